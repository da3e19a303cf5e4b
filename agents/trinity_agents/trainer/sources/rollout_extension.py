"""Base class of sources that add experiences to the rollouts of another source; the rollouts set the pace."""

from __future__ import annotations

from typing import Any

from trinity_agents.trainer.sources.base import Source


class RolloutExtension:
    """Delegates to the source of rollouts; a subclass implements ``next``, ``consumed``, ``state`` and ``restore``.

    Args:
        rollouts: Source of rollouts, which sets the pace and counts progress.
    """

    def __init__(self, rollouts: Source) -> None:
        self._rollouts = rollouts
        rollouts.has_company = True

    @property
    def has_company(self) -> bool:
        """Always True: rollouts are trained on with the experiences that this source adds."""
        return True

    @has_company.setter
    def has_company(self, value: bool) -> None:
        self._rollouts.has_company = value

    @property
    def changed(self) -> Any:
        """Notified when rollouts may be available."""
        return self._rollouts.changed

    @changed.setter
    def changed(self, notifier: Any) -> None:
        self._rollouts.changed = notifier

    @property
    def bytes_since_save(self) -> int:
        """Bytes of rollouts read since the last checkpoint was committed."""
        return self._rollouts.bytes_since_save

    @bytes_since_save.setter
    def bytes_since_save(self, count: int) -> None:
        self._rollouts.bytes_since_save = count

    @property
    def ended(self) -> int | None:
        """Number of batches of the run, None while unknown."""
        return self._rollouts.ended

    @property
    def waiting(self) -> list[str]:
        """Tickets of rollouts that have arrived and are not consumed."""
        return self._rollouts.waiting

    @property
    def unused(self) -> list[int]:
        """Numbers of batches of rollouts that were repaired too late."""
        return self._rollouts.unused

    def available(self) -> bool:
        """Return whether the rollouts of the next step have arrived."""
        return self._rollouts.available()

    def run_begins(self, offset: int) -> None:
        """Skip all messages before this offset of the ``ready`` stream."""
        self._rollouts.run_begins(offset)

    async def run(self) -> None:
        """Read the stream of rollouts until cancelled."""
        await self._rollouts.run()
