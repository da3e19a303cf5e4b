"""Shows the experiences of a run as the trainer reads them, and its evaluation answers, for commands and the page."""
