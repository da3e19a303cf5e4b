"""The ``trinity-mq`` command. Modules here are imported only when their command is given."""
