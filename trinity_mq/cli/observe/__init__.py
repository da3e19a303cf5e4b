"""The state of one run, collected from its broker and its folder: what the page and the exporter show."""
