"""Bytes on disk: tables of a run, run folders, locks, atomic writes."""
