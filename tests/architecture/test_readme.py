"""The workflow in the README does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.workflows import Task

README = Path(__file__).parents[2] / "README.md"


class Answering:
    """A model that answers 7 as often as it is asked to."""

    async def chat_async(self, messages: list[dict[str, str]], *, n: int) -> list[Experience]:
        assert messages == [{"role": "user", "content": "3,7,2="}]
        return [Experience(tokens=[1, 2], prompt_length=1, response_text="7") for _ in range(n)]


async def test_the_workflow_of_the_readme_runs() -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "readme"}
    exec(code.group(1), names)
    task = Task(workflow=names["EchoWorkflow"], raw_task={"question": "3,7,2=", "answer": "7"})
    workflow = names["EchoWorkflow"](task=task, model=Answering())
    workflow.set_repeat_times(3, 4)
    experiences = await workflow.run_async()
    assert [(one.eid.run, one.reward) for one in experiences] == [(4, 1.0), (5, 1.0), (6, 1.0)]
