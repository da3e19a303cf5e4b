"""The checkpoint channel: files carry the weights."""
