"""Settings that were removed: a file that still sets such a key to another value than the constant gets a warning in
release 0.2 and is refused from 0.3 on.

Each row names the constant that replaced the setting and tells the user what to do instead. docs/renamed.md has the
same list.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from trinity_mq.release import VERSION

REFUSING_RELEASE = (0, 3)
"""First release that refuses removed keys."""
_SHOWN: dict[Any, Any] = {}
"""Registry of the module ``warnings`` for warnings that were shown."""


class RemovedSettingWarning(FutureWarning):
    """A configuration sets a key that was removed. Python shows this warning to users by default."""


class RemovedKey(NamedTuple):
    """The replacement of one removed setting."""

    value: Any
    """Value used now, which was the default of the setting. A file that sets this value loses nothing."""
    constant: str
    """Dotted path of the constant that holds ``value``. Empty: another setting replaces the removed setting."""
    advice: str
    """Next step for a user who needs another value."""


REMOVED_KEYS: Mapping[str, RemovedKey] = MappingProxyType(
    {
        "explorer.batch_tries": RemovedKey(
            3,
            "trinity_agents.explorer.training_batches.MANIFEST_TRIES",
            "remove it; to wait longer for an idle operator, raise explorer.operator_deadline",
        ),
        "explorer.cancel_grace": RemovedKey(
            2.0,
            "trinity_mq.dispatch.dispatcher.CANCEL_GRACE",
            "remove it; to give the last tasks of a batch more time, raise explorer.over_rollout.wait_after_min",
        ),
        "explorer.dynamic_timeout.warmup_min_steps": RemovedKey(
            1,
            "trinity_mq.dispatch.timeouts.WARMUP_BATCHES",
            "remove it; if the first batches are the slow ones, raise explorer.dynamic_timeout.ratio",
        ),
        "explorer.rollout_model.max_batch_delay": RemovedKey(
            0.005,
            "trinity_mq.engines.server.server.MAX_BATCH_DELAY",
            "remove it; to bound a static batch, set explorer.rollout_model.max_batch_sequences",
        ),
        "explorer.auxiliary_models.health_interval": RemovedKey(
            10.0,
            "trinity_mq.engines.external.HEALTH_INTERVAL",
            "remove it; a call that the server refuses triggers a health check at once",
        ),
        "runner.eval_concurrency": RemovedKey(
            None,
            "",
            "remove it; a runner takes as many evaluation slices as training slices, runner.concurrency",
        ),
        "runner.max_stuck": RemovedKey(
            16,
            "trinity_agents.runner.agent.MAX_STUCK",
            "remove it; workflows that never return belong into processes: runner.blocking=process",
        ),
        "runner.max_block": RemovedKey(
            30.0,
            "trinity_agents.runner.agent.MAX_BLOCK",
            "remove it; make the workflow synchronous, or move the part that blocks into a thread",
        ),
        "runner.max_isolated": RemovedKey(
            2,
            "trinity_agents.runner.slice_executor.MAX_ISOLATED",
            "remove it; to run every blocking workflow in a process of its own, set runner.blocking=process",
        ),
        "runner.circuit_breaker.tries": RemovedKey(
            16,
            "trinity_agents.runner.circuit.MAX_TRIES",
            "remove it; runner.circuit_breaker.tries_alone is the limit of a slice that fails alone",
        ),
        "runner.circuit_breaker.pause": RemovedKey(
            5.0,
            "trinity_agents.runner.circuit.PAUSE",
            "remove it; to pause later, raise runner.circuit_breaker.failures",
        ),
        "runner.circuit_breaker.max_pause": RemovedKey(
            300.0,
            "trinity_agents.runner.circuit.MAX_PAUSE",
            "remove it; to end a run earlier in an outage, lower explorer.stall_timeout",
        ),
        "synchronizer.member_lease": RemovedKey(
            15.0,
            "trinity_mq.sync.gate.member_driver.MEMBER_LEASE",
            "remove it; synchronizer.sync_timeout bounds each phase of a sync",
        ),
        "synchronizer.checkpoint_keep": RemovedKey(
            2,
            "trinity_mq.sync.channels.checkpoint.channel.KEPT_VERSIONS",
            "remove it; to keep the models of many steps, set trainer.keep_every",
        ),
        "broker.publish_timeout": RemovedKey(
            300.0,
            "trinity_mq.config.bus.PUBLISH_TIMEOUT",
            "remove it; to let agents hold messages for longer, raise broker.consumer_timeout",
        ),
        "buffer.trainer_input.replay.cache_bytes": RemovedKey(
            2**28,
            "trinity_agents.trainer.sources.replay.CACHE_BYTES",
            "remove it; to replay from fewer groups, lower buffer.trainer_input.replay.capacity",
        ),
        "algorithm.optimizer.decay_norms_and_biases": RemovedKey(
            False,
            "trinity_mq.training.optimizers.DECAY_NORMS_AND_BIASES",
            "remove it; algorithm.optimizer.weight_decay applies to matrices alone",
        ),
    }
)
"""Removed settings by dotted key, without list positions."""


def without_removed_keys(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``settings`` without removed keys, and one line for each removed key whose value is not used.

    A key with the value of its constant is dropped without a line: the folders of earlier runs set every key.
    """
    lines: list[str] = []
    kept = dict(settings)
    for key, row in REMOVED_KEYS.items():
        kept = _without(kept, key.split("."), (), row, lines)
    return kept, lines


def is_refusing(version: str = VERSION) -> bool:
    """Return whether a release refuses removed keys.

    >>> is_refusing("0.2.7"), is_refusing("0.3.0.dev0")
    (False, True)
    """
    return tuple(int(part) for part in version.split(".")[:2]) >= REFUSING_RELEASE


def warn_of_removed_key(line: str, where: str) -> None:
    """Show a line of :func:`without_removed_keys` once, as a warning whose place is the user's file ``where``."""
    warnings.warn_explicit(
        f"{line}. Release 0.3 refuses the key", RemovedSettingWarning, filename=where, lineno=0, registry=_SHOWN
    )


def _without(section: Any, parts: Sequence[str], place: tuple[str, ...], row: RemovedKey, lines: list[str]) -> Any:
    """Return a section, or a list of sections, without the key ``parts``. Nothing is changed in place."""
    if isinstance(section, list | tuple):
        return [_without(item, parts, (*place, str(number)), row, lines) for number, item in enumerate(section)]
    if not isinstance(section, Mapping) or parts[0] not in section:
        return section
    name, inner = parts[0], parts[1:]
    if inner:
        return {**section, name: _without(section[name], inner, (*place, name), row, lines)}
    if section[name] != row.value:
        used = f"{row.value!r} ({row.constant}) is used, not" if row.constant else "nothing uses"
        lines.append(f"{'.'.join((*place, name))}: this setting was removed; {used} {section[name]!r}: {row.advice}")
    return {key: value for key, value in section.items() if key != name}
