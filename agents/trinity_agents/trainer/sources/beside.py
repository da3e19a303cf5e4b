"""The base of sources that put further experiences beside the rollouts of another source, which sets the pace."""

from __future__ import annotations

from typing import Any

from trinity_agents.trainer.sources.base import Source


class BesideRollouts:
    """Passes on everything that concerns the rollouts alone; a subclass has ``next``, ``consumed``, ``state`` and
    ``restore``.

    Args:
        rollouts: Paces, and counts progress.
    """

    def __init__(self, rollouts: Source) -> None:
        self._rollouts = rollouts
        rollouts.has_company = True

    @property
    def has_company(self) -> bool:
        """Rollouts are trained on with what this source adds."""
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
        """Batches of the run, None as long as that is unknown."""
        return self._rollouts.ended

    @property
    def waiting(self) -> list[str]:
        """Tickets of rollouts that are here and not consumed."""
        return self._rollouts.waiting

    @property
    def unused(self) -> list[int]:
        """Batches of rollouts that were repaired too late."""
        return self._rollouts.unused

    def available(self) -> bool:
        """Return whether the rollouts of the next step are there."""
        return self._rollouts.available()

    def run_begins(self, offset: int) -> None:
        """Pass over what lies before this offset of the ``ready`` stream."""
        self._rollouts.run_begins(offset)

    async def run(self) -> None:
        """Read the stream of rollouts until cancelled."""
        await self._rollouts.run()
