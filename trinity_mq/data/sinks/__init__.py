"""Outputs of processed experiences, written batch by batch. A repeated write of a batch is idempotent."""
