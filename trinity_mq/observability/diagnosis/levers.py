"""Remedies by cause. Each names a setting or a command; a test checks that the settings exist."""

from __future__ import annotations

from trinity_mq.observability.diagnosis.records import Room

LEVERS = {
    "broker": (
        "free memory or disk on the broker; the run then resumes by itself; `rabbitmqctl status` and "
        "`trinity-mq doctor` say which alarm is set"
    ),
    "unreachable": "start the broker, or repair the connection to it; the run then resumes by itself (`trinity-mq "
    "doctor`)",
    "silent": (
        "end its process ({id}, `kill -9`): its unfinished work is redelivered, and a supervisor (`trinity-mq run`) "
        "restarts it"
    ),
    "silent_runner": (
        "end its process ({id}, `kill -9`): the broker gives its slices to others, and a supervisor (`trinity-mq "
        "run`) restarts it; a workflow that blocks its event loop is ended after 30 seconds"
    ),
    "engine": (
        "end the engine's process (`kill -9`): its host then restarts it, and also does so by itself after "
        "explorer.rollout_model.lease seconds without an answer"
    ),
    "engine_starting": "see logs/engine-{id}.out in the run's folder; explorer.rollout_model chooses engine and number",
    "explorer": (
        "start it: `trinity-mq explorer CONFIG`, or the whole run again with `trinity-mq run CONFIG`; if its process "
        "exists, it is frozen: end it (`kill -9`)"
    ),
    "runner": "start a runner: `trinity-mq runner CONFIG`; runner.num_runners says how many `trinity-mq run` starts",
    "operator": "start an operator: `trinity-mq operator CONFIG`; operator.num_operators says how many `trinity-mq "
    "run` starts",
    "trainer": (
        "start it: `trinity-mq trainer CONFIG`, or the whole run again with `trinity-mq run CONFIG`; if its process "
        "exists, it is frozen: end it (`kill -9`)"
    ),
    "slice": (
        "look at its workflow and reward function; to wait less lower explorer.max_timeout, or raise "
        "explorer.over_rollout.ratio so that batches close without the slowest tasks"
    ),
    "step": (
        "look at logs/trainer-0.out and at what the machine does; lower buffer.batch_size, or raise "
        "trainer.max_tokens_per_micro_batch"
    ),
    "sync": "synchronizer.sync_timeout ends an attempt; see the engines' and the trainer's logs",
    "batch": "look at the operators in operator.operators; operator.timeout ends an attempt at a batch",
    "review": (
        "give the verdicts: `trinity-mq review list` shows the runs, and `trinity-mq review keep`, `drop` and `reward` "
        "judge one, as the page of `trinity-mq dash` does; `seconds` of human_review in operator.operators bounds it"
    ),
    "lane": "bring the service back, or install what the error names; the runners try again by themselves, at least "
    "every 5 minutes (`trinity-mq status` shows the next try)",
    "lost_slices": (
        "wait half a minute: the explorer sends them again by itself. Find out who deleted or purged the queue: a "
        "person, a policy of the broker, or `trinity-mq broker clean`"
    ),
    "evaluation": "explorer.eval_timeout bounds it; runner.concurrency gives it more slots",
    "tasks": "submit tasks with `trinity-mq submit`, or raise buffer.total_steps if the taskset is used up",
    "sessions": "open a session there with `POST /sessions`, let an agent use its URL, and reward it (docs/serving.md)",
    "wait": "look at `trinity-mq status` and at the logs; explorer.stall_timeout ends a run in which nothing moves",
    "loading": "wait: the model is being loaded; see its log if that does not end",
    "nobody": "start the run: `trinity-mq run CONFIG`; `trinity-mq list` shows the runs of this machine",
    "slow_trainer": "raise trainer.max_tokens_per_micro_batch, or let it do less: lower algorithm.epochs",
    "slow_operator": "reduce the work of operator.operators",
    "slow_runner": "raise runner.concurrency; explorer.over_rollout.ratio cuts the slowest tasks",
    "slow_engine": "lower model.max_response_tokens; explorer.over_rollout.ratio cuts the slowest tasks",
    "slow_explorer": (
        "let rollouts run further ahead: synchronizer.sync_offset, synchronizer.pipeline_depth, "
        "explorer.max_open_batches"
    ),
    "slow_sync": "raise synchronizer.sync_interval, or choose another synchronizer.sync_method",
    "slow_sessions": "open more sessions at the gateway: a batch needs buffer.batch_size groups of gateway.group_size",
}
"""Remedies by cause; ``{id}`` stands for the culprit."""


MORE: dict[str, tuple[Room, str]] = {
    "step": ("devices", "raise trainer.nproc or trainer.num_threads"),
    "slow_trainer": ("devices", "raise trainer.nproc or trainer.num_threads"),
    "slow_engine": ("devices", "raise explorer.rollout_model.engine_num"),
    "slow_runner": ("cores", "raise runner.num_runners"),
    "slow_operator": ("cores", "raise operator.num_operators"),
}
"""Remedies by cause that need a free device or core on the machine."""
FREE: dict[Room, str] = {"devices": "cores or GPUs", "cores": "cores"}


def lever(cause: str, culprit: str = "", room: frozenset[Room] | None = None) -> str:
    """Return the remedy for ``cause``.

    Args:
        cause: A key of :data:`LEVERS`.
        culprit: Id of the agent to blame.
        room: Free resources of the run's machine. None: unknown; advice that needs a resource then names it as a
            condition.
    """
    text = LEVERS[cause].replace("{id}", culprit)
    if cause not in MORE:
        return text
    need, more = MORE[cause]
    if room is None:
        return f"{text}; where the machine has free {FREE[need]}, {more}"
    return f"{more}; or {text}" if need in room else text
