"""Engines that turn micro-batches into per-token log-probs and gradients."""
