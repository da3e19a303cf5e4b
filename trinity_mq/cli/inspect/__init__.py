"""``trinity-mq inspect``: experiences as the trainer reads them."""
