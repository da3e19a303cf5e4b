"""The example of an operator with a model, asked through the clients that operators get, and through real HTTP."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from tests.unit.workflows.tiny_engines import make_generator, scripted_judge, tiny_engine
from trinity_agents.operator.chain_run import auxiliary_clients
from trinity_mq.config import OperatorConfig
from trinity_mq.experience import EID, Experience
from trinity_mq.models import InferenceModel
from trinity_mq.operators import ExperienceOperatorV1, OperatorError, create_operators, run_chain

EXAMPLE = Path(__file__).parents[3] / "examples" / "llm_judge.py"
NAME = "llm_judge_example"
JUDGED = "experience_pipeline/0_LlmJudge"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def judge(model: InferenceModel, **args: Any) -> AsyncIterator[ExperienceOperatorV1]:
    clients = auxiliary_clients(["judge"], lambda name: model)
    (operator,) = create_operators([OperatorConfig(name=f"{NAME}.LlmJudge", args=args)], clients)
    await operator.prepare()
    try:
        yield operator
    finally:
        for client in clients["judge"]:
            await client.close()


def exps(*rewards: float | None) -> list[Experience]:
    common: Any = {"tokens": [1, 2], "prompt_length": 1, "prompt_text": "What is 1 + 1?"}
    return [
        Experience(eid=EID(1, 0, run), reward=reward, response_text=f"answer {run}", **common)
        for run, reward in enumerate(rewards)
    ]


def by_answer(**answers: str) -> Callable[[Any], str]:
    return lambda messages: next(text for run, text in answers.items() if f"answer {run[1:]}" in messages[1]["content"])


async def test_scores_become_part_of_the_reward(example: ModuleType) -> None:
    said = by_answer(r0="Score: 10", r1="I think\nscore = 5.", r2="no idea", r3="Score: 0")
    async with scripted_judge(said) as served, judge(served.model, weight=0.5) as operator:
        kept, metrics = await run_chain([operator], exps(1.0, None, 1.0, 1.0))
        assert "<question>What is 1 + 1?</question>\n<answer>answer" in served.asked[0][1]["content"]
    assert [exp.reward for exp in kept] == [1.5, 0.25, 1.0, 1.0]
    assert [exp.metrics.get("judge_score") for exp in kept] == [1.0, 0.5, None, 0.0]
    found = {name.removeprefix(f"{JUDGED}/"): value for name, value in metrics.items() if name.startswith(JUDGED)}
    assert found == {"judged": 3, "not_judged": 1, "score_mean": 0.5}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 0.7),
        ("score=7, no, SCORE : 8", 0.8),
        ("Score: 7\n" + "x" * 2000, None),
        ("x" * 10**7 + "Score: 7", 0.7),
        ("Score: 11", None),
        ("Score: 7.5", None),
        ("Score: 1000", None),
        ("Score:" * 200_000, None),
        ("score" + " " * 900 + ": 7", None),
        ("", None),
        (None, None),
    ],
)
def test_what_a_judge_may_say(example: ModuleType, text: str | None, score: float | None) -> None:
    assert example.score_in(text) == score


async def test_a_real_engine_is_asked(example: ModuleType, tmp_path: Path) -> None:
    """Its model is random: what counts is that its answers arrive, whatever they say."""
    async with (
        tiny_engine(make_generator(tmp_path / "model"), "judge") as engine,
        judge(engine, max_tokens=8) as operator,
    ):
        kept, metrics = await run_chain([operator], exps(1.0, 0.0))
    assert metrics[f"{JUDGED}/judged"] + metrics[f"{JUDGED}/not_judged"] == 2
    assert len(kept) == 2


async def test_a_judge_that_refuses_fails_the_batch_one_that_is_silent_changes_nothing_and_none_does_not_start(
    example: ModuleType,
) -> None:
    async with scripted_judge(None) as served, judge(served.model) as operator:
        kept, metrics = await run_chain([operator], exps(1.0))
    assert (kept[0].reward, metrics[f"{JUDGED}/not_judged"]) == (1.0, 1)
    async with scripted_judge(400) as served, judge(served.model) as operator:
        with pytest.raises(OperatorError, match=r"0_LlmJudge: BadRequestError: .*out of order"):
            await run_chain([operator], exps(1.0, 1.0))
    others = {"teacher": [openai.AsyncOpenAI(api_key="x")]}
    (operator,) = create_operators([OperatorConfig(name=f"{NAME}.LlmJudge")], others)
    with pytest.raises(ValueError, match=r"'judge' is no model of explorer.auxiliary_models: teacher"):
        await operator.prepare()
