"""The page that shows a run, and the actions that it offers."""
