"""The form of an entry."""

Entry = tuple[str, str, str, tuple[str, ...], str]
"""Code, title, meaning, ranked causes, fix."""
