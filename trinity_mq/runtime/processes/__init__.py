"""Other processes: start by fork or command line, supervision, and requests over pipes."""
