"""What recorded boundaries are good for: checked again, recomputed, bisected, shrunk."""
