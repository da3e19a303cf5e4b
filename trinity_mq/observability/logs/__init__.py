"""The command ``trinity-mq logs``."""
