"""``trinity-mq regrade``: rewards of sampled experiences under another reward function."""
