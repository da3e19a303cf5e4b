"""``trinity-mq inspect``: shows experiences as the trainer reads them."""
