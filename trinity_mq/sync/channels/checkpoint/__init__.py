"""The checkpoint channel: weights travel as files."""
