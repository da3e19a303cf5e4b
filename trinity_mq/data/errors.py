"""The error of tasksets."""

from trinity_mq.runtime.errors import FatalError


class TasksetError(FatalError, ValueError):
    """A taskset cannot be read, or a saved position does not belong to it; the message says where and what to do."""
