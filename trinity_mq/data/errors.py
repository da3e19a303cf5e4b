"""What goes wrong with data, in one line a person can act on."""

from trinity_mq.runtime.errors import FatalError


class TasksetError(FatalError, ValueError):
    """A taskset cannot be read, or a saved position does not belong to it; the message says where and what to do."""
