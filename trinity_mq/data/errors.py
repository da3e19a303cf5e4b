"""What goes wrong with data, in one line a person can act on."""


class TasksetError(ValueError):
    """A taskset cannot be read, or a saved position does not belong to it; the message says where and what to do."""
