"""The state of one run, collected from its broker and its folder for the dashboard page and the exporter."""
