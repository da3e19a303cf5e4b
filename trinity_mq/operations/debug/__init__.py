"""``trinity-mq debug``: runs a task, runs an algorithm on a small batch, renders a conversation; without a broker."""
