"""``trinity-mq doctor``: checks of a live broker and of this machine."""
