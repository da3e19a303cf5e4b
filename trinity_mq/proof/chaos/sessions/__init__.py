"""Sessions of a trial in mode ``serve``: their clients, their stream, and their invariants."""
