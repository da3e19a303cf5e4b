"""The code in README and docs does what they say, and the files that they name are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trinity_mq.config import OperatorConfig
from trinity_mq.config.agents import OperatorsConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.experience import Experience
from trinity_mq.messages import BatchReady
from trinity_mq.operators import OperatorConfigError, create_operators, run_chain
from trinity_mq.rewards import create_reward
from trinity_mq.rewards.registry import parts_of
from trinity_mq.workflows import Task

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ROOMS = ("", "agents", "agents/trinity_agents", "trinity_mq", "docs", "tests")
"""Folders that a path in a document may be relative to."""
SIBLINGS = ("trinity_mq/sync", "trinity_mq/bus", "trinity_mq/observability", "trinity_mq/proof")
WRITING_AN_OPERATOR = (ROOT / "docs" / "writing-an-operator.md").read_text(encoding="utf-8")
STEP_WISE = ROOT / "examples" / "step_wise.py"
SIZES_AND_REWARDS = ((256, 3.0), (257, 1.0), (1, 0.5), (1, -1.0), (1, None))
"""Response tokens and rewards of the experiences that the documented operators get."""
LONGEST = 30
"""Lines that a step-wise workflow may take."""


@pytest.mark.parametrize("start", [ROOT / "README.md", ROOT / "docs" / "README.md"], ids=["README", "docs/README"])
def test_both_lists_of_pages_have_all_of_them(start: Path) -> None:
    assert f"{len(PRESETS)} presets" in (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(start.parent / name).resolve() for name in re.findall(r"\]\(([\w/.-]+\.md)\)", start.read_text())}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {path.name for path in linked} <= {"README.md"}


def blocks() -> dict[str, str]:
    """Return the documents' Python by the class or function that it defines; the same name is the same code."""
    found: dict[str, str] = {}
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for node in ast.parse(code).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    assert found.setdefault(node.name, code) == code, f"{page.name} has another {node.name}"
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
    """``tests/e2e/test_examples.py`` trains with it."""
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


def test_the_reward_of_the_documents_judges() -> None:
    reward = create_reward(defined(blocks()["brief_and_right"])["brief_and_right"], {})
    assert parts_of(reward, " 7 ", "7", finished=True) == {"accuracy": 1.0, "brevity": 0.1}
    assert parts_of(reward, "8", "7", finished=False) == {"accuracy": 0.0, "brevity": 0.0}


async def test_the_operators_of_the_documents_run_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package.py").write_text(blocks()["KeepShort"] + blocks()["Bounded"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    section, review = re.findall(r"```yaml\n(operator:.*?)```", WRITING_AN_OPERATOR, re.DOTALL)
    assert OperatorsConfig(**yaml.safe_load(review)["operator"]).review_seconds > 900
    create_operators([OperatorConfig(**one) for one in yaml.safe_load(review)["operator"]["operators"]])
    configured = [OperatorConfig(**one) for one in yaml.safe_load(section)["operator"]["operators"]]
    configured.insert(1, OperatorConfig(name="my_package.Bounded", args={"most": 2}))
    exps = [Experience(tokens=[1] + [2] * size, prompt_length=1, reward=reward) for size, reward in SIZES_AND_REWARDS]
    kept, metrics = await run_chain(create_operators(configured), exps)
    assert [(exp.response_length, exp.reward) for exp in kept] == [(256, 2.0), (1, 0.5)]
    assert metrics["experience_pipeline/0_KeepShort/dropped"] == 1
    assert metrics["experience_pipeline/1_Bounded/lowered"] == 1
    with pytest.raises(OperatorConfigError, match="max_tokens is 'many'"):
        create_operators([OperatorConfig(name="my_package.KeepShort", args={"max_tokens": "many"})])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.(?:py|md|yaml|toml))?)`", text))
    links = set(re.findall(r"\]\(([^)#:]+)\)", text))
    outside = r"(runs|checkpoints|model|adapter|state|broker|history|logs|final|stopped|tensorboard|trace)/"
    named = {path for path in paths if not re.match(outside, path)}
    assert {path for path in named if not any((ROOT / room / path).exists() for room in (*ROOMS, *SIBLINGS))} == set()
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_a_run_with_an_operator_is_simulated_without_a_broker(tmp_path: Path) -> None:
    simulate = defined(blocks()["simulate"])["simulate"]
    run = simulate(tmp_path, *re.findall(r'"(\w+\.\w+=[^"]*)"', WRITING_AN_OPERATOR))
    assert run.values("experience_pipeline/experience_count") == [(1, 2.0), (2, 2.0), (3, 2.0)], "two of four a batch"
    assert run.dead_letters() == []
    assert [ready.state for ready in run.published(BatchReady)] == ["ready"] * 3
    assert run.learners[0].steps == [1, 2, 3]
