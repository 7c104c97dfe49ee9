"""Presentation: terminal, field table, explanations."""
