"""The ``trinity-mq`` command. The module of a command is imported only when that command runs."""
