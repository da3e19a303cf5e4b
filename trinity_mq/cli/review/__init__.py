"""The command ``trinity-mq review``."""
