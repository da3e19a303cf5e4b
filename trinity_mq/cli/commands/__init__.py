"""Commands that fit into one module each."""
