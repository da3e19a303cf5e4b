"""``trinity-mq dash``: one page that shows a run, live from its broker or only from its folder."""
