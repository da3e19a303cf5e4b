"""Other processes: forked or started anew, kept alive, asked over pipes."""
