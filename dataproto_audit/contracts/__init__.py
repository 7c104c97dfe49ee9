"""Declarations of fields and stages, and their checker."""
