"""A trainer of several processes: its ranks, and models sharded over them."""
