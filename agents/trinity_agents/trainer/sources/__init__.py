"""Sources of train batches: the stream of rollouts, and records that are there."""
