"""Starts a RabbitMQ on this machine: a private node of an installed server, or a container."""
