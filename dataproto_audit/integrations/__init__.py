"""Producers of boundaries in other frameworks."""
