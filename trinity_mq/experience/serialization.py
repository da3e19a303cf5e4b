"""Serialization of :class:`Experience`: experience bodies, and legacy bodies if they are allowed."""

from __future__ import annotations

from trinity_mq.experience.batch import decode, encode
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.record import Experience


def decode_any(data: bytes | memoryview, allow_legacy: bool) -> list[Experience]:
    """Return the experiences in a body.

    Raises:
        DecodeError: ``data`` is not an experience body, or is a legacy body and ``allow_legacy`` is False.
    """
    from trinity_mq.experience.legacy.reader import legacy_form, read_legacy

    form = legacy_form(data)
    if form is None:
        return decode(data)
    if not allow_legacy:
        raise DecodeError(
            f"a legacy body ({form}), wanted an experience body; if you know where it comes from, pass "
            "allow_legacy=True, or convert it once with `trinity-mq convert-experiences`"
        )
    return read_legacy(data)


Experience.encode_body, Experience.decode_body = encode, decode_any
