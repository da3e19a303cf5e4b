"""``trinity-mq debug``: runs one task once, or an algorithm on a small batch, without a broker."""
