"""Sources of train batches: the stream of rollouts, and existing records."""
