"""The base class of all daemons, and the helpers for processes, GPUs, plug-ins and HTTP that they share."""
