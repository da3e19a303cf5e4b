"""The exception for tasks and training data that cannot be used."""

from trinity_mq.runtime.errors import FatalError


class TasksetError(FatalError, ValueError):
    """Tasks or training data cannot be read, a saved position does not match them, or a selector or formatter cannot be
    used. The message gives the place and the remedy.
    """
