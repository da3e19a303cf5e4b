"""Wrong uses of the public interface: each line that ends with ``# E: code`` is that error; no other line is one."""

from __future__ import annotations

from typing import Any

from trinity_mq import (
    ColumnOperator,
    Experience,
    ExperienceBatch,
    ExperienceOperatorV1,
    Explorer,
    Scheduler,
    Workflow,
    load_config,
    run,
)
from trinity_mq import workflow as wrong_name  # E: attr-defined
from trinity_mq.workflows import Arguments, arguments_of


class WrongReturn(Workflow):
    async def run_async(self) -> list[str]:  # E: override
        return []


class WrongModel(Workflow):
    async def run_async(self) -> list[Experience]:
        return await self.model.chat_async("a text is no list of messages")  # E: arg-type


class WrongOperator(ExperienceOperatorV1):
    async def process(self, exps: list[Experience]) -> list[Experience]:  # E: override
        return exps


class WrongColumns(ColumnOperator):
    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        return batch.values("reward"), {}  # E: return-value


def wrong_calls(scheduler: Scheduler, one: Experience) -> None:
    run(17)  # E: arg-type
    run("a.yaml", fresh="yes")  # E: arg-type
    text: str = load_config("a.yaml").buffer.batch_size  # E: assignment
    batch: int = load_config("a.yaml").bufer.batch_size  # E: attr-defined
    scheduler.schedule("no tasks", 1)  # E: arg-type
    one.rewrad = 1.0  # E: attr-defined
    Experience(tokens=[1, 2], prompt_lenght=1)  # E: call-arg
    arguments_of(1, Arguments)  # E: arg-type
    Explorer("no configuration")  # E: arg-type
    wrong_name(text, batch)
