"""The collective channel: weights travel as one broadcast to all engines."""
