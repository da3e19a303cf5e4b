"""A package that uses the public interface as the documentation shows it: without an error under mypy --strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trinity_mq import (
    EID,
    ColumnOperator,
    Config,
    Experience,
    ExperienceBatch,
    ExperienceOperatorV1,
    ModelWrapper,
    RunHandle,
    RunResult,
    Scheduler,
    Status,
    Task,
    Workflow,
    group_by,
    load_config,
    run,
)
from trinity_mq.workflows import WORKFLOWS, Arguments, SandboxFailed, arguments_of


class EchoArguments(Arguments):
    temperature: float = Field(1.0, ge=0)


@WORKFLOWS.register_module("downstream_echo")
class EchoWorkflow(Workflow):
    is_async = True
    can_repeat = True
    arguments = EchoArguments

    async def run_async(self) -> list[Experience]:
        given = arguments_of(self.task, EchoArguments)
        messages = [{"role": "user", "content": str(self.task.raw_task["question"])}]
        if not messages:
            raise SandboxFailed("empty", kind="empty")
        experiences = await self.model.chat_async(messages, n=self.repeat_times, temperature=given.temperature)
        for number, experience in enumerate(experiences, start=self.run_id_base):
            experience.eid.run = number
            experience.reward = float(self.task.raw_task["answer"] in (experience.response_text or ""))
        return experiences


def brief_and_right(response: str, truth: str | None, *, finished: bool) -> dict[str, float]:
    return {"accuracy": float(truth == response.strip()), "brevity": 0.1 if finished else 0.0}


class KeepShort(ExperienceOperatorV1):
    def __init__(self, max_tokens: int = 512) -> None:
        self.max_tokens = max_tokens

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [one for one in exps if len(one.tokens) - one.prompt_length <= self.max_tokens]
        return kept, {"dropped": float(len(exps) - len(kept))}


class Bounded(ColumnOperator):
    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, float]]:
        rewards = batch.values("reward")
        return batch.replace(reward=[reward if reward is None else min(reward, 1.0) for reward in rewards]), {}


def follow(path: str, overrides: Mapping[str, Any]) -> RunResult:
    config: Config = load_config(path)
    handle: RunHandle = run(config, [f"{name}={value}" for name, value in overrides.items()], fresh=True)
    seen: list[tuple[int, float]] = []
    for line in handle.metrics():
        if "rollout/reward/mean" in line.values:
            seen.append((line.step, line.values["rollout/reward/mean"] / 2))
    return handle.wait(60.0)


async def schedule(scheduler: Scheduler, tasks: list[Task]) -> tuple[list[Status], list[Experience]]:
    scheduler.schedule(tasks, 1)
    return await scheduler.get_results(1, timeout=10.0)


def by_task(experiences: list[Experience], model: ModelWrapper) -> dict[str, list[Experience]]:
    experiences.append(Experience(eid=EID(batch=1, task=2), tokens=[1, 2, 3], prompt_length=1))
    return group_by(experiences, "task")
