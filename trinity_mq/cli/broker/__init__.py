"""``trinity-mq broker`` and the connection of other commands to a run's broker."""
