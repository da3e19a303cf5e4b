"""Workflows under the names of Trinity-RFT. Prompts, rewards and metrics were computed with its release 0.6.0 from the
same answers; a prompt is compared by the hash of its messages.
"""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity_mq.renamed import CHANGED_NAMES
from trinity_mq.rewards import REWARD_FUNCTIONS, find_reward
from trinity_mq.workflows import FormatArgs, Task, TaskError, execute, load_workflow
from trinity_mq.workflows.builtin.trinity import compute_toolcall_reward
from trinity_mq.workflows.builtin.trinity_judges import rubric_rating, ruler_scores
from trinity_mq.workflows.games.sudoku_moves import parse_moves
from trinity_mq.workflows.registry import WORKFLOWS

RECORD = {"question": "3 times 4?", "answer": "12"}
TAGGED = [
    "<think>3*4</think>\n<answer>12</answer>",
    "<think>a</think><answer>13</answer> x",
    "The answer is 12.",
    ("<think>x", "response_truncated"),
    "<think>t</think> <answer>12.0</answer>\nmore",
]
BOXES = [
    "It is \\boxed{12}.",
    "<think>3*4</think> \\boxed{12}",
    "\\boxed{13}",
    ("\\boxed{12}", "response_truncated"),
    "12",
    "<think><think></think> \\boxed{\\text{12 cm}}",
]
TAG_REWARDS = [1.1, -0.1, 0.9, -0.1, 1.1]
BOX_REWARDS = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


class Scripted:
    """An auxiliary model: a judge that answers from a list, and a teacher with one logprob for all tokens."""

    model_name = model_path = "judge"
    model = SimpleNamespace(url="http://127.0.0.1:1")

    def __init__(self, *answers: str) -> None:
        self.answers, self.requests, self.temperatures = list(answers), list[Any](), list[Any]()

    def _completion(self, **request: Any) -> Any:
        self.requests.append(request)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.answers.pop(0)))])

    async def _completion_async(self, **request: Any) -> Any:
        return self._completion(**request)

    def get_openai_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._completion)))

    def get_openai_async_client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._completion_async)))

    async def logprobs_async(self, tokens: list[int], temperature: float) -> torch.Tensor:
        self.temperatures.append(temperature)
        return torch.full((len(tokens) - 1,), -2.0)


def hashed(messages: Any) -> str:
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


async def outcome(name: str, model: Any, runs: int, *, judge: Scripted | None = None, **keys: Any) -> Any:
    reward = keys.pop("reward", None)
    task = Task(
        workflow=load_workflow(name),
        raw_task=keys.pop("raw_task", RECORD),
        reward_fn=find_reward(reward) if isinstance(reward, str) else reward,
        **{"batch_id": 1, "task_id": 3, **keys},
    )
    workflow = task.to_workflow(model, [judge] if judge else [])
    if workflow.can_repeat:
        workflow.set_repeat_times(runs, 4)
    return await execute(lambda: workflow, type(workflow))


def rewards(experiences: Any) -> list[float]:
    return [round(experience.reward, 6) for experience in experiences]


SYSTEM = {"format_args": FormatArgs(system_prompt="Mine.")}
EMPTY = {"format_args": FormatArgs(system_prompt="")}
PREFIX = {"format_args": FormatArgs(reply_prefix="Let me")}
THINK = {"workflow_args": {"with_think": True}}
BASE = {"workflow_args": {"use_base": True, "with_think": True, "format_score_coef": 0.0}}
EMPTY_BASE = {"workflow_args": {"use_base": True}, **EMPTY}
DAPO = {
    "reward": "math_dapo_reward",
    "reward_fn_args": {
        "enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 30, "cache_length": 20
    },
}  # fmt: skip
SINGLE_TURN = [
    ("math", {}, TAGGED, "355156892474be35", TAG_REWARDS),
    ("math", SYSTEM, TAGGED, "9983e753ef5ab192", TAG_REWARDS),
    ("math", EMPTY, TAGGED, "afbb0fda05d56281", TAG_REWARDS),
    ("math", PREFIX, TAGGED, "d9a7bb5aa8d40e7a", TAG_REWARDS),
    ("math", {"reward": "math_boxed_reward"}, BOXES, "afbb0fda05d56281", BOX_REWARDS),
    ("math_boxed", {}, BOXES, "6adb45a680b1fc38", BOX_REWARDS),
    ("math_boxed", SYSTEM, BOXES, "9983e753ef5ab192", BOX_REWARDS),
    ("math_boxed", PREFIX, BOXES, "214add53cb635a81", BOX_REWARDS),
    ("math_boxed", THINK, BOXES, "ade01edfb82505b2", [0.9, 1.0, -0.1, 0.9, -0.1, 0.9]),
    ("math_boxed", BASE, BOXES, "24ef744fb167a1fc", [0.9, 1.0, -0.1, 0.9, -0.1, 0.9]),
    ("math_boxed", EMPTY_BASE, BOXES, "4717738141e3c58f", BOX_REWARDS),
    ("math_boxed", DAPO, BOXES, "6adb45a680b1fc38", [0.6, 0.0, -1.05, 0.95, 1.0, 0.0]),
    ("simple", {"reward": "math_reward"}, TAGGED, "afbb0fda05d56281", TAG_REWARDS),
]


@pytest.mark.parametrize("twin", ["", "async_"])
@pytest.mark.parametrize(("name", "keys", "answers", "prompt", "wanted"), SINGLE_TURN)
async def test_single_turn(
    twin: str, name: str, keys: Any, answers: Any, prompt: str, wanted: list[float], stub_model: Any
) -> None:
    model = stub_model(answers)
    experiences = await outcome(f"{twin}{name}_workflow", model, len(answers), **keys)
    [(messages, sampling)] = model.calls
    assert hashed(messages) == prompt
    assert sampling["n"] == len(answers)
    assert rewards(experiences) == wanted
    assert [experience.eid.run for experience in experiences] == list(range(4, 4 + len(answers)))
    assert experiences[0].metrics.keys() == {"accuracy", "format_score"}
    masked = [not experience.action_mask.any() for experience in experiences]
    assert masked == [name == "math_boxed" and not isinstance(answer, str) for answer in answers]


@pytest.mark.parametrize("name", ["math_eval_workflow", "async_math_eval_workflow"])
async def test_an_evaluation_asks_as_qwen_does_and_gives_no_reward(name: str, stub_model: Any) -> None:
    model = stub_model(BOXES[:1])
    (experience,) = await outcome(name, model, 1, is_eval=True, rollout_args={"temperature": 0.1}, **SYSTEM)
    assert hashed(model.calls[0][0]) == "ec6e8a576df4f21a"
    assert model.calls[0][1] == {"temperature": 0.6, "top_p": 0.8, "n": 1}
    assert (experience.reward, experience.metrics) == (None, {"accuracy": 1.0})
    with pytest.raises(TaskError, match="needs the problem as question"):
        await outcome(name, stub_model([]), 1, raw_task={"problem": "q"})


class Near:
    def __call__(self, response: Any, messages: Any, ground_truth: Any = None) -> dict[str, float]:
        return {"near": float(len(messages)), "match": float(response.response_text == ground_truth)}


async def test_a_reward_model_sees_the_conversation_without_a_system_prompt(stub_model: Any) -> None:
    model = stub_model(["12", "13"])
    experiences = await outcome("math_rm_workflow", model, 2, reward=Near)
    assert (hashed(model.calls[0][0]), rewards(experiences)) == ("afbb0fda05d56281", [2.0, 1.0])


@pytest.mark.parametrize("name", ["math_ruler_workflow", "async_math_ruler_workflow"])
@pytest.mark.parametrize(
    ("verdict", "wanted"), [("so [0.2, 1.5, -1, 1, 0]", [0.2, 1.0, 0.0, 1.0, 0.0]), ("[0.1]", [0.0] * 5)]
)
async def test_ruler(name: str, verdict: str, wanted: list[float], stub_model: Any) -> None:
    judge, model = Scripted(verdict), stub_model(TAGGED)
    experiences = await outcome(name, model, 5, judge=judge)
    assert hashed(model.calls[0][0]) == "355156892474be35"
    assert hashed(judge.requests[0].pop("messages")) == "f6152542cc83283f"
    assert judge.requests == [{"model": "judge", "stream": False}]
    assert rewards(experiences) == wanted
    assert [round(experience.metrics["gold_reward"], 6) for experience in experiences] == TAG_REWARDS
    assert {experience.metrics["judge_success"] for experience in experiences} == {float(len(set(wanted)) > 1)}


@pytest.mark.parametrize(
    ("verdict", "scores"),
    [
        ("[a, b]", None), ("I like 2", None), ("] [", None), ("[0.5, [1]]", None), ("[1, True]", [1.0, 1.0]),
        ("x [0] y [0.25, 7]", [0.25, 1.0]), ("[" * 9000 + "]" * 9000, None), ("[0.5, '1']", None), ("{}[1,1", None),
    ],
)  # fmt: skip
def test_scores(verdict: str, scores: list[float] | None) -> None:
    assert ruler_scores(verdict, 2) == scores


TRUSTED = ["x [0.1, 0.2, 2, 1, 0]", "none", "[1,1,1,1,1]", "[0.5]", "[0,0,0,0,0.25]"]
JUDGED_REWARDS = [0.346667, 0.0, 0.566667, 0.0, 0.483333]


@pytest.mark.parametrize(("task_id", "uses_truth"), [(7, True), (3, False)])
async def test_trainable_ruler(task_id: int, uses_truth: bool, stub_model: Any) -> None:
    model = stub_model(TAGGED + TRUSTED)
    experiences = await outcome("math_trainable_ruler_workflow", model, 5, task_id=task_id)
    assert [hashed(messages) for messages, _ in model.calls] == ["355156892474be35", "0b1e10e4febb6518"]
    assert [sampling["n"] for _, sampling in model.calls] == [5, 5 if uses_truth else 1]
    if uses_truth:
        assert rewards(experiences) == TAG_REWARDS + JUDGED_REWARDS
        assert [experience.eid.task for experience in experiences] == ["7"] * 5 + ["7-ruler"] * 5
        assert experiences[5].metrics == pytest.approx({"judge_success": 0.6, "reward_for_judge": 0.346667}, abs=1e-6)
    else:
        assert rewards(experiences) == [0.1, 0.2, 1.0, 1.0, 0.0]
    assert experiences[0].metrics["gold_reward"] == 1.1


async def test_a_fifth_of_the_tasks_uses_the_truth(stub_model: Any) -> None:
    counts = []
    for task_id in range(400):
        model = stub_model(["a", "b", "[0, 1]", "[0, 1]"])
        await outcome("math_trainable_ruler_workflow", model, 2, task_id=task_id, reward="exact_match")
        counts.append(model.calls[1][1]["n"])
    assert set(counts) == {1, 2}
    assert 50 < counts.count(2) < 110


RUBRIC = [{"weight": 2, "description": "is right"}, {"weight": -1.0, "description": "is long"}]
RATED = [
    '```json\n{"rating": 7}\n```', '```\n{"rating": 10.0}```', '{"rating": 7}', '```json {"rating": 11} ```',
    '```json {"rating": true}```',
]  # fmt: skip
RUBRIC_HASHES = ["52464d8ada69897f", "d1d9ddc8fe0ca734", "b91eb9f53c3068b9", "09fa72df5b1be2ad", "0197fec81f47fe5f"]


@pytest.mark.parametrize("name", ["rubric_judge_workflow", "async_rubric_judge_workflow"])
async def test_rubric(name: str, stub_model: Any) -> None:
    judge, model = Scripted(*RATED), stub_model(TAGGED)
    experiences = await outcome(name, model, 5, judge=judge, raw_task={**RECORD, "rubric": RUBRIC})
    assert hashed(model.calls[0][0]) == "e1924c41a3bd9102"
    assert [hashed(request["messages"]) for request in judge.requests] == RUBRIC_HASHES
    assert judge.requests[0]["temperature"] == 0.0
    assert rewards(experiences) == [0.7, 1.0, 0.0, 0.0, 0.1]
    assert {experience.metrics["judge_success"] for experience in experiences} == {0.6}
    with pytest.raises(TaskError, match="wanted a list of maps with weight and description"):
        await outcome(name, stub_model([]), 1, judge=judge, raw_task={**RECORD, "rubric": ["right"]})


def test_a_rating_that_is_not_json_is_none() -> None:
    assert [rubric_rating(text) for text in ("```json", "```json [7] ```", "```json {```", "", "```{}```")] == [
        None
    ] * 5


async def test_a_judge_of_the_environment(stub_model: Any, monkeypatch: pytest.MonkeyPatch, aiohttp_judge: Any) -> None:
    arguments = {"judge_model_name": "outside", "judge_api_base_url_env": "JUDGE_URL", "judge_api_key_env": "JUDGE_KEY"}
    with pytest.raises(TaskError, match="JUDGE_URL of the runner is not set"):
        await outcome("rubric_judge_openai_workflow", stub_model([]), 1, workflow_args=arguments)
    monkeypatch.setenv("JUDGE_URL", aiohttp_judge.address)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    name = "async_rubric_judge_openai_workflow"
    experiences = await outcome(name, stub_model(["12", "13"]), 2, workflow_args=arguments)
    assert rewards(experiences) == [0.7, 0.7]
    assert [(body["model"], body["temperature"]) for body in aiohttp_judge.bodies] == [("outside", 0.0)] * 2
    assert set(aiohttp_judge.keys) == {"Bearer secret"}


@pytest.fixture
async def aiohttp_judge() -> Any:
    from aiohttp import web

    seen = SimpleNamespace(bodies=[], keys=[], address="")

    async def answer(request: web.Request) -> web.Response:
        seen.bodies.append(await request.json())
        seen.keys.append(request.headers["Authorization"])
        message = {"role": "assistant", "content": RATED[0]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "outside", "choices": [choice]}
        return web.json_response(body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    seen.address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield seen
    await runner.cleanup()


CALL = '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'
TOOLS = {
    "tools": json.dumps([{"name": "add", "parameters": {}}, {"name": "sub"}]),
    "raw_system": "Sys.",
    "answer": CALL,
    "conversations": [
        {"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "hm"}, {"from": "observation", "value": "o"},
        {"from": "function_call", "value": {"x": 1}}, {"from": "odd", "value": "y"},
    ],
}  # fmt: skip
CALLS = [
    f"<think>t</think><tool_call>{CALL}</tool_call>",
    f"<tool_call>{CALL}</tool_call>",
    "<think>t</think><tool_call>[]</tool_call>",
    '<think>t</think> <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>',
    f"<tool_call>{CALL}</tool_call><think>t</think>",
    "<think>t</think><tool_call>{</tool_call>",
    f"<think>t</think><tool_call>{CALL.replace('2', '3')}</tool_call>",
    f"<think>t</think><tool_call>x</tool_call><tool_call>{CALL}</tool_call>",
]


@pytest.mark.parametrize(
    ("name", "answer", "wanted"),
    [("tool_call_workflow", CALL, [1, 0, 0, 1, 0, 0, 0, 1]), ("toolcall_workflow", "[]", [0, 0, 1, 0, 0, 0, 0, 0])],
)
async def test_tool_calls(name: str, answer: str, wanted: list[int], stub_model: Any) -> None:
    model = stub_model(CALLS)
    experiences = await outcome(name, model, 8, raw_task={**TOOLS, "answer": answer})
    assert (hashed(model.calls[0][0]), rewards(experiences)) == ("bfde7fad4b9f74ac", wanted)
    assert experiences[0].metrics == {}


@pytest.mark.parametrize("key", ["tools", "conversations"])
async def test_a_record_without_tools_or_conversation_is_refused(key: str, stub_model: Any) -> None:
    with pytest.raises(TaskError, match=rf"raw_task\['{key}'\] is '\{{', wanted a list"):
        await outcome("tool_call_workflow", stub_model([]), 1, raw_task={**TOOLS, key: "{"})


@pytest.mark.parametrize("text", ["<tool_call>" * 50_000, f"<think></think><tool_call>{'[' * 50_000}</tool_call>", "7"])
def test_hostile_calls_are_wrong(text: str) -> None:
    assert compute_toolcall_reward(text, CALL) == 0.0


def test_calls_that_are_nested_too_deeply_are_wrong() -> None:
    for depth in range(500, 1100):  # at some depth they can be read as JSON but not be written
        arguments = "[" * depth + "]" * depth
        text = f'<think></think><tool_call>[{{"name": "add", "arguments": {arguments}}}]</tool_call>'
        assert compute_toolcall_reward(text, CALL) == 0.0


@pytest.mark.parametrize(
    ("name", "answers", "prompt", "wanted"),
    [
        ("on_policy_distill_workflow", ["abc", "de"], "afbb0fda05d56281", [0.0, 0.0]),
        ("on_policy_distill_math_workflow", BOXES, "ec6e8a576df4f21a", [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
    ],
)
async def test_distillation(name: str, answers: Any, prompt: str, wanted: list[float], stub_model: Any) -> None:
    teacher, model = Scripted(), stub_model(answers)
    arguments = {"temperature": 0.7, "check_vocabulary": False}
    experiences = await outcome(name, model, len(answers), judge=teacher, workflow_args=arguments)
    assert (hashed(model.calls[0][0]), rewards(experiences)) == (prompt, wanted)
    assert teacher.temperatures == [0.7] * len(answers)
    assert ("accuracy" in experiences[0].metrics) == (name == "on_policy_distill_math_workflow")
    assert experiences[0].teacher_logprobs.tolist() == [-2.0] * experiences[0].response_length


async def test_a_subclass_reads_further_arguments_and_the_workflow_itself_refuses_them(stub_model: Any) -> None:
    class Mine(load_workflow("math_boxed_workflow")):  # type: ignore[misc]
        def reset(self, task: Task) -> None:
            super().reset(task)
            self.extra = task.workflow_args["extra"]

        def format_messages(self) -> Any:
            return [{"role": "user", "content": self.extra}]

    model = stub_model(BOXES[:1])
    task = Task(workflow=Mine, raw_task=RECORD, workflow_args={"extra": "hello", "with_think": True})
    (experience,) = await execute(lambda: task.to_workflow(model), Mine)
    assert (model.calls[0][0][0]["content"], experience.reward) == ("hello", 0.9)
    with pytest.raises(TaskError, match=r"workflow_args\.extra does not exist"):
        await outcome("math_boxed_workflow", model, 1, workflow_args={"extra": 1})


# -- sudoku

SOLUTION = [[(3 * (row % 3) + row // 3 + column) % 9 + 1 for column in range(9)] for row in range(9)]
BLANKS = {(0, 0), (0, 1), (8, 8)}
PUZZLE = [[0 if (row, column) in BLANKS else SOLUTION[row][column] for column in range(9)] for row in range(9)]
BOARDS = {"puzzle": PUZZLE, "solution": SOLUTION}
FIRST = "73bce76995284c20"


@pytest.mark.parametrize("name", ["sudoku_workflow", "async_sudoku_workflow"])
@pytest.mark.parametrize(
    ("answers", "prompts", "wanted"),
    [
        (["0 0 1\n0 1 2", f"8 8 {SOLUTION[8][8]}"], [FIRST, "2efab234b5c52fc6"], [0.0, 1.0]),
        (["3 3 1"], [FIRST], [-1.0]),
        (["I play 0 0 1"], [FIRST], [-1.0]),
        (["0 0 9"], [FIRST], [-1.0]),
        (["0 0 1", "0 0 1"], [FIRST, "85a0ae0fe5c6f4b4"], [0.0, -1.0]),
    ],
)
async def test_sudoku(name: str, answers: list[str], prompts: list[str], wanted: list[float], stub_model: Any) -> None:
    model = stub_model(answers)
    experiences = await outcome(name, model, 1, raw_task=BOARDS)
    assert [hashed(messages) for messages, _ in model.calls] == prompts
    assert rewards(experiences) == wanted
    assert [experience.eid.step for experience in experiences] == list(range(len(wanted)))


async def test_a_prompt_of_sudoku_that_is_too_long_is_masked_and_not_judged(stub_model: Any) -> None:
    model = stub_model([("[masked]", "prompt_truncated")])
    model.enable_prompt_truncation = True
    [experience] = await outcome("sudoku_workflow", model, 1, raw_task={})
    assert (experience.reward, experience.truncate_status) == (0.0, "prompt_truncated")


async def test_the_runs_of_a_task_get_the_same_random_board(stub_model: Any) -> None:
    models = [stub_model(["no"]) for _ in range(3)]
    for model in models:
        await outcome("sudoku_workflow", model, 1, raw_task={})
    first, *others = (model.calls[0][0][0]["content"] for model in models)
    assert others == [first, first]
    assert first.count("\n0 ") + first.count(" 0") >= 40


@pytest.mark.parametrize("text", ["", "0 0 1\n" * 6, "0 0", "9 0 1", "0 0 0", "0 0 x", "\u0660" * 9000])
def test_moves_that_are_none(text: str) -> None:
    assert parse_moves(text) is None


def test_each_name_with_another_meaning_is_there_as_are_the_new_names_of_the_former_ones() -> None:
    """Tasks of release 0.2 name them, also behind ``async_``."""
    for old, new in CHANGED_NAMES["workflow"].items():
        assert [name for name in (old, f"async_{old}", new, f"async_{new}") if name not in WORKFLOWS] == []
    assert [name for pair in CHANGED_NAMES["reward_fn"].items() for name in pair if name not in REWARD_FUNCTIONS] == []
    for name in ("async_frozen_lake_workflow", "async_sudoku_workflow"):
        assert load_workflow(name).is_async
    assert load_workflow("async_frozen_lake_workflow") is load_workflow("frozen_lake_workflow")
