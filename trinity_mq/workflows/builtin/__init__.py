"""Built-in workflows."""
