"""The reference training loop whose every stage boundary is audited."""
