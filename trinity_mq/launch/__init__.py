"""``trinity-mq run`` and ``status``: a whole run on one machine, and its display."""
