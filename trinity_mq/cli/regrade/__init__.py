"""``trinity-mq regrade``: rewards of what was sampled, by another reward function."""
