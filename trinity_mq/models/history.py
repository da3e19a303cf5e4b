"""What a wrapped model was asked and answered, kept until a workflow takes it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from trinity_mq.experience import Experience


class History:
    """Experiences in the order in which their answers came. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._experiences: list[Experience] = []

    def add(self, experiences: Iterable[Experience]) -> None:
        """Keep ``experiences``."""
        with self._lock:
            self._experiences.extend(experiences)

    def take(self, *, clear: bool) -> list[Experience]:
        """Return what is kept; ``clear`` forgets it."""
        with self._lock:
            taken = list(self._experiences)
            if clear:
                self._experiences.clear()
        return taken
