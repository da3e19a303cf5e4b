"""``trinity-mq debug``: one run of one task without a broker."""
