"""Reports of a run: evaluation tables, curves and an HTML page."""
