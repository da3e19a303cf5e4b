"""Records the calls of a workflow as experiences, whichever client makes them."""
