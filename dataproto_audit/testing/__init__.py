"""Faults to seed, healthy batches to compare with."""
