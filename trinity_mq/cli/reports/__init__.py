"""Reports of a run: tables of evaluations, curves, one HTML page."""
