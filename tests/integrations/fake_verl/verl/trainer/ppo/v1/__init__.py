"""The V1 trainer."""
