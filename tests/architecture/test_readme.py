"""The workflows in the README do what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.workflows import Task

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
STEP_WISE = ROOT / "examples" / "step_wise.py"
LONGEST = 30
"""Lines that a step-wise workflow may take."""


def blocks() -> dict[str, str]:
    """The README's Python by the workflow class that it defines."""
    found = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.parse(code).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = code
    return found


def defined(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(code, names)
    return names


class Answering:
    """A model that answers 7 as often as it is asked to."""

    async def chat_async(self, messages: list[dict[str, str]], *, n: int) -> list[Experience]:
        assert messages == [{"role": "user", "content": "3,7,2="}]
        return [Experience(tokens=[1, 2], prompt_length=1, response_text="7") for _ in range(n)]


async def test_the_workflow_of_the_readme_runs() -> None:
    kind = defined(blocks()["EchoWorkflow"])["EchoWorkflow"]
    task = Task(workflow=kind, raw_task={"question": "3,7,2=", "answer": "7"})
    workflow = kind(task=task, model=Answering())
    workflow.set_repeat_times(3, 4)
    experiences = await workflow.run_async()
    assert [(one.eid.run, one.reward) for one in experiences] == [(4, 1.0), (5, 1.0), (6, 1.0)]


class Recording:
    """A model that answers from a list through its OpenAI client, and records."""

    enable_history = True
    model_name = "m"

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.asked, self.history = answers, [], []

    def get_openai_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self.create)))

    def create(self, *, messages: list[dict[str, str]], **given: Any) -> Any:
        self.asked.append(messages[-1]["content"])
        self.history.append(Experience(tokens=[1, 2], prompt_length=1))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.answers.pop(0)))])

    def extract_experience_from_history(self) -> list[Experience]:
        taken, self.history = self.history, []
        return taken


def test_the_step_wise_workflow_of_the_readme_is_the_example_and_runs() -> None:
    """``tests/e2e/test_step_wise.py`` trains with it."""
    example = STEP_WISE.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(example))
    code = example.removeprefix(f'"""{docstring}"""').strip() + "\n"
    assert len(code.splitlines()) <= LONGEST
    assert blocks()["LargestFirst"] == code
    kind = defined(code)["LargestFirst"]
    for answers, rewards in ((["7", "3"], [1.0, 1.0]), (["7", "2"], [1.0, 0.0]), (["3"], [0.0])):
        model = Recording(list(answers))
        experiences = kind(task=Task(workflow=kind, raw_task={"question": "3,7,2="}), model=model).run()
        assert model.asked == ["3,7,2=", "3,2="][: len(rewards)]
        assert [one.reward for one in experiences] == rewards
        assert [one.eid.step for one in experiences] == list(range(len(rewards)))
        assert [one.metrics["accuracy"] for one in experiences] == rewards
