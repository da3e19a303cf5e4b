"""Errors of encoding and decoding."""

from __future__ import annotations

from trinity_mq.messages import DecodeError


class EncodeError(ValueError):
    """An experience holds a value that the wire format cannot carry; the message names the field and the key."""


__all__ = ["DecodeError", "EncodeError"]
