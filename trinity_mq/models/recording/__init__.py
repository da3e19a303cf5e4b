"""Records the calls of a workflow as experiences, with any client."""
