"""Host names and addresses."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
