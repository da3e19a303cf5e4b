"""The exception for tasksets that cannot be used."""

from trinity_mq.runtime.errors import FatalError


class TasksetError(FatalError, ValueError):
    """A taskset cannot be read, or a saved position does not match it. The message gives the place and the remedy."""
