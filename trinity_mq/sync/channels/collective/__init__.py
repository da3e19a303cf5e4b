"""The collective channel: one broadcast carries the weights to all engines."""
