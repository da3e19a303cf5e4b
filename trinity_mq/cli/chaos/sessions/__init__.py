"""Sessions of a trial in mode ``serve``: the clients that hold them, their stream, and their invariants."""
