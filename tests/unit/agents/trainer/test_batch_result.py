"""What becomes of one batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_agents.trainer.batch_result import StepResult, train_on
from trinity_agents.trainer.decisions import MAX_STARTS
from trinity_agents.trainer.sources.base import BatchResult, TrainBatch
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.training.checkpoints.checkpoint import StepAttempts


class Learner:
    """Keeps what it was given."""

    def __init__(self, attempts: StepAttempts, optimizer_steps: float = 1.0, critic_steps: float = 0.0) -> None:
        self.attempts, self.optimizer_steps, self.critic_steps = attempts, optimizer_steps, critic_steps
        self.given: list[list[tuple[int | str, int]]] = []
        self.noted: list[int] = []
        self.more: dict[str, float] = {}

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        self.given.append([(one.eid.task, step_number) for one in experiences])
        self.noted.append(self.attempts.starts("t"))
        steps = {"actor/optimizer_steps": self.optimizer_steps, "critic/optimizer_steps": self.critic_steps}
        return steps | self.more


def batch(*steps: int, state: str = "ready") -> TrainBatch:
    """A batch of one experience a task, each sampled by the weights of one of these steps."""
    experiences = [
        Experience(
            eid=EID(batch=1, task=task, run=0),
            tokens=torch.tensor([3, 4], dtype=torch.int32),
            prompt_length=1,
            logprobs=torch.zeros(1),
            versions=[(0, 1, step)],
        )
        for task, step in enumerate(steps)
    ]
    return TrainBatch(1, "t", "o", state, ExperienceBatch.of(experiences), reason="why")  # type: ignore[arg-type]


async def judged(
    folder: Path, one: TrainBatch, learner: Learner | None = None
) -> tuple[BatchResult, StepResult, Learner]:
    folder.mkdir(exist_ok=True)
    attempts = StepAttempts(folder) if learner is None else learner.attempts
    learner = learner or Learner(attempts)
    result = await train_on(one, 5, learner=learner, attempts=attempts, max_staleness=2)  # type: ignore[arg-type]
    assert one.result is not None
    return one.result, result, learner


async def test_what_is_fit_is_trained_on_and_the_rest_told(tmp_path: Path) -> None:
    one = batch(5, 2, 3)
    verdict, step, learner = await judged(tmp_path, one)
    assert (verdict.outcome, verdict.reason, verdict.stale_tasks, verdict.kills) == ("trained", None, [1], False)
    assert learner.given == [[(0, 6), (2, 6)]]
    assert [e.eid.task for e in one.experiences] == [0, 2], "what was trained on is what is left"
    assert step.metrics["sample/dropped_stale_groups"] == 1.0
    assert learner.noted == [1], "noted before the step"
    assert learner.attempts.starts("t") == 0, "and forgotten after it"


async def test_nothing_fit_is_no_step(tmp_path: Path) -> None:
    verdict, _, learner = await judged(tmp_path, batch(2, 1))
    assert (verdict.outcome, verdict.stale_tasks, learner.given) == ("dropped", [0, 1], [])


async def test_the_tasks_of_groups_that_are_too_old_are_told_once_each_if_they_have_a_number(tmp_path: Path) -> None:
    experiences = batch(5, 0, 0, 1).experiences.to_list()
    for experience, (task, run) in zip(experiences, [(7, 0), (7, 1), (0, 0), ("by name", 0)], strict=True):
        experience.eid.task, experience.eid.run = task, run
    verdict, _, _ = await judged(tmp_path, TrainBatch(1, "t", "o", "ready", ExperienceBatch.of(experiences)))
    assert (verdict.outcome, verdict.stale_tasks, verdict.dropped) == ("dropped", [0, 7], 4)


async def test_what_is_not_ready_keeps_its_state_and_reason(tmp_path: Path) -> None:
    for state in ("empty", "failed", "gone"):
        verdict, _, learner = await judged(tmp_path, batch(state=state))
        assert (verdict.outcome, verdict.reason, learner.given) == (state, "why", [])


async def test_a_step_that_could_not_be_made_is_skipped(tmp_path: Path) -> None:
    verdict, _, _ = await judged(tmp_path, batch(5), Learner(StepAttempts(tmp_path), 0.0))
    assert (verdict.outcome, verdict.reason) == ("skipped", "no optimizer step was possible")


@pytest.mark.parametrize(
    ("skipped", "outcome", "reason"),
    [
        ({"empty": 2.0, "mismatch": 0.0}, "empty", "no token to train on"),
        (
            {"empty": 1.0, "mismatch": 1.0, "nonfinite_loss": 2.0},
            "skipped",
            "the guard let no optimizer step through (mismatch, nonfinite_loss)",
        ),
    ],
)
async def test_a_batch_without_a_token_is_empty_and_one_that_the_guard_refused_is_not(
    tmp_path: Path, skipped: dict[str, float], outcome: str, reason: str
) -> None:
    learner = Learner(StepAttempts(tmp_path), 0.0)
    learner.more = {f"actor/skipped_{name}": count for name, count in skipped.items()}
    verdict, _, _ = await judged(tmp_path, batch(5), learner)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


async def test_a_step_of_the_critic_alone_is_trained_on_and_makes_no_version(tmp_path: Path) -> None:
    verdict, step, _ = await judged(tmp_path, batch(5), Learner(StepAttempts(tmp_path), 0.0, 1.0))
    assert (verdict.outcome, verdict.reason, step.stepped) == ("trained", None, False)
    assert step.metrics["sample/skipped_step"] == 0.0  # the critic stepped: nothing is lost


async def test_what_trainers_did_not_survive_is_left_alone_and_stays_on_record(tmp_path: Path) -> None:
    attempts = StepAttempts(tmp_path)
    for _ in range(MAX_STARTS):
        attempts.begin(["t"])
    verdict, _, learner = await judged(tmp_path, batch(5), Learner(attempts))
    assert (verdict.outcome, verdict.kills, learner.given) == ("skipped", True, [])
    assert attempts.starts("t") == MAX_STARTS


async def test_batches_are_joined_and_selected_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A train step's batches may be gigabytes: half a second without a heartbeat was seen."""
    threads: list[int] = []
    for name in ("columns", "select"):
        method = getattr(ExperienceBatch, name)

        def noted(self: ExperienceBatch, *arguments: Any, method: Any = method) -> Any:
            threads.append(threading.get_ident())
            return method(self, *arguments)

        monkeypatch.setattr(ExperienceBatch, name, noted)
    one = batch(5, 4)
    one.others = [batch(4, 5)]
    verdict, _, learner = await judged(tmp_path, one)
    assert (verdict.outcome, len(learner.given[0])) == ("trained", 4)
    assert len(threads) >= 4, "two batches are joined, and what is left of each is selected"
    assert threading.get_ident() not in threads
