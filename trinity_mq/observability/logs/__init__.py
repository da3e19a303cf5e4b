"""The log files of a run, for ``trinity-mq logs``."""
