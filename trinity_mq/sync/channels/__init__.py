"""Channels that carry weights from the trainer to the engines."""
