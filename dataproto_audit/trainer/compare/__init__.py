"""Whether two backends or layouts compute the same: runs, measurements and the comparison.

What the values should be is handed in by the caller; nothing here knows another engine than the
ones under test.
"""
