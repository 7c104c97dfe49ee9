"""What the loop computes: advantages, KL estimators and losses.

Written for speed in the precision of the run, and on their own: ``reference/`` writes the same
quantities from the papers in float64, and the auditor compares the two.
"""
