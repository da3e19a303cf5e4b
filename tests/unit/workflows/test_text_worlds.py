"""Text environments in a process of their own: a real process, with scripted packages or with the real ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workflows.scripted_runs import run_scripted
from tests.unit.workflows.scripted_worlds import ALFWORLD_GAME, write_worlds
from trinity_mq.config import FormatConfig
from trinity_mq.experience import Experience
from trinity_mq.workflows import SandboxFailed, Task, TaskError, load_workflow
from trinity_mq.workflows.environments import prompts
from trinity_mq.workflows.environments.alfworld import read_parts
from trinity_mq.workflows.environments.children import BusyProcesses, ChildEnvironment
from trinity_mq.workflows.environments.conversation import read_action
from trinity_mq.workflows.environments.worlds import (
    ScienceWorldArguments,
    read_closed_action,
    refused_purchase,
    split_purchase,
)
from trinity_mq.workflows.sessions.children import close_persistent_programs, kept

BOIL = json.dumps({"task_name": "boil", "var_num": 1, "jar_path": "/nowhere/scienceworld.jar"})


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Environment variables of the scripted packages."""
    yield write_worlds(tmp_path)
    await close_persistent_programs()


@pytest.fixture
def game(tmp_path: Path) -> str:
    """A game in its folder, which ends with ``take mug 1``."""
    (tmp_path / "games").mkdir()
    path = tmp_path / "games" / "game.tw-pddl"
    path.write_text("take mug 1;1")
    return str(path)


async def play(
    name: str, prompt: Any, answers: Sequence[str], env: dict[str, str], **arguments: Any
) -> tuple[list[Experience], list[str]]:
    """Return the experiences of a run, and the prompts of its requests."""
    record = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    if "textworld" in name or "alfworld" in name:
        arguments = {"games": str(Path(prompt).parent), **arguments}
    is_eval, limit = arguments.pop("is_eval", False), arguments.pop("limit", None)
    task = Task(
        workflow=load_workflow(name),
        raw_task=record,
        workflow_args={"env": env, **arguments},
        format_args=FormatConfig(prompt_key="prompt"),
        is_eval=is_eval,
    )
    experiences, generator = await run_scripted(task, list(answers), max_prompt_tokens=limit)
    return experiences, generator.prompts


def action(text: str) -> str:
    return f"<think>so</think><action>{text}</action>"


def users(prompt: str) -> list[str]:
    """Return the user's messages in a prompt of the scripted chat template."""
    turns = prompt.split("<|im_start|>")
    return [turn.partition("\n")[2].removesuffix("<|im_end|>\n") for turn in turns if turn.startswith("user\n")]


async def test_scienceworld_rewards_the_highest_score(worlds: dict[str, str]) -> None:
    said = [action("good"), "no action", action("bad")]
    [experience], asked = await play("sciworld_workflow", BOIL, said, worlds)
    assert asked[0].startswith(f"<|im_start|>system\n{prompts.SCIENCEWORLD}<|im_end|>\n")
    assert users(asked[-1]) == [
        "Observation: \nTask Description: Your task is boil 1.\nenvironment 1",
        "Observation: \n1: good",
        "Observation: \n2: ",
    ]
    assert experience.reward == 0.6
    assert experience.info["turns"] == 3
    facts = {"env_rounds": 2.0, "env_done": 1.0, "golden_rounds": 2.0, "prompt_too_long": 0.0}
    assert experience.metrics | facts == experience.metrics


async def test_scienceworld_ends_after_its_steps_and_its_simulator_is_used_again(worlds: dict[str, str]) -> None:
    [first], _ = await play("sciworld_workflow", BOIL, [action("x")] * 30, worlds)
    assert (first.reward, first.metrics["env_rounds"], first.metrics["env_done"]) == (0.0, 29.0, 0.0)
    melt = json.dumps({"task_name": "melt", "var_num": 0})
    _, asked = await play("sciworld_workflow", melt, [action("end")], worlds)
    assert users(asked[0]) == ["Observation: \nTask Description: Your task is melt 0.\nenvironment 1"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "wanted JSON such as"),
        ("[" * 9000, "wanted JSON such as"),
        ('{"task_name": "boil"}', "wanted JSON such as"),
        ('{"task_name": "fly", "var_num": 0}', "cannot load this task: Unknown taskName: 'fly'"),
        ('{"task_name": "boil", "var_num": 3}', "variation 3 of task 'boil' does not exist; it has 3"),
    ],
)
async def test_a_record_without_a_task_of_scienceworld_says_so(worlds: dict[str, str], prompt: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        await play("sciworld_workflow", prompt, [], worlds)


async def test_an_environment_that_fails_is_a_failure_of_the_environment(worlds: dict[str, str]) -> None:
    with pytest.raises(SandboxFailed, match="scienceworld failed in step: RuntimeError: the simulator is gone") as one:
        await play("sciworld_workflow", BOIL, [action("raise")], worlds)
    assert one.value.kind == "environment"
    _, asked = await play("sciworld_workflow", BOIL, [action("end")], worlds)
    assert users(asked[0])[0].endswith("environment 2")  # the broken one is not used again


async def test_an_environment_that_hangs_costs_its_own_run_alone(tmp_path: Path, worlds: dict[str, str]) -> None:
    file = tmp_path / "file"
    other = asyncio.create_task(play("sciworld_workflow", BOIL, [action(f"await {file}"), action("end")], worlds))
    with pytest.raises(SandboxFailed, match=r"within workflow_args.step_seconds \(1 s\); its process was ended"):
        await play("sciworld_workflow", BOIL, [action("hang")], worlds, step_seconds=1)
    file.touch()
    [experience], _ = await other
    assert experience.reward == 0.4
    await play("sciworld_workflow", BOIL, [action("end")], worlds)


TASK = {"task_name": "boil", "variation": 1, "simplification": "easy", "step_limit": 100}


async def test_a_run_that_is_cancelled_once_more_leaves_no_process_that_hangs(worlds: dict[str, str]) -> None:
    arguments = ScienceWorldArguments(env=worlds)
    process = kept(arguments.program())
    environment = ChildEnvironment(arguments, process)
    await environment.open(TASK)
    for call in (environment.step("hang"), environment.close()):
        task = asyncio.create_task(call)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not process.runs


async def test_a_process_ends_with_its_runner_also_while_an_environment_hangs(worlds: dict[str, str]) -> None:
    process = await ScienceWorldArguments(env=worlds).program().start()
    assert process.stdin is not None
    assert process.stdout is not None
    for request in ({"do": "open", "args": TASK}, {"do": "step", "action": "hang"}):
        process.stdin.write(json.dumps({**request, "key": "0", "id": 0}).encode() + b"\n")
    assert "ready" in json.loads(await process.stdout.readline())
    assert "observation" in json.loads(await process.stdout.readline())
    process.stdin.close()
    try:
        async with asyncio.timeout(20):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


async def test_environments_at_a_time_are_limited_and_a_cancelled_run_frees_its_own(worlds: dict[str, str]) -> None:
    waiting = asyncio.create_task(play("sciworld_workflow", BOIL, [action("hang")], worlds, at_once=1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    runs = [play("sciworld_workflow", BOIL, [action("good"), action("end")], worlds, at_once=1) for _ in range(3)]
    played = await asyncio.gather(*runs)
    assert [experience.reward for [experience], _ in played] == [1.0] * 3
    assert len({users(asked[0])[0] for _, asked in played}) == 1  # one simulator served all


async def test_tasks_of_a_program_may_differ_in_their_limit() -> None:
    busy = BusyProcesses()
    assert [await busy.take(at_once) for at_once in (2, 2, 3)] == [0, 1, 2]
    waiting = [asyncio.create_task(busy.take(at_once)) for at_once in (1, 3, 3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    for number in (1, 0):
        busy.release(number)
        await asyncio.sleep(0.01)
        assert not waiting[2].done(), "a run with a higher limit does not overtake"
    busy.release(2)
    assert [await waiting[0], await waiting[2]] == [0, 1]


async def test_what_is_missing_is_said_before_a_run_and_by_it(tmp_path: Path, worlds: dict[str, str]) -> None:
    assert ScienceWorldArguments(env=worlds).missing() == []
    env = {"PYTHONPATH": str(tmp_path / "nowhere"), "PATH": str(tmp_path / "nowhere")}
    missing = ScienceWorldArguments(env=env).missing()
    assert [reason.split(":")[0].split(" in ")[0] for reason in missing] == [
        "module scienceworld is not installed",
        "there is no program 'java',",
    ]
    assert "default-jre-headless" in missing[1]
    with pytest.raises(SandboxFailed, match="pip install scienceworld; there is no program 'java'"):
        await play("sciworld_workflow", BOIL, [], env)
    assert "there is no program" in ScienceWorldArguments(python=str(tmp_path / "python")).missing()[0]
    with pytest.raises(SandboxFailed, match=r"run its setup[.]sh, which fetches"):
        await play("webshop_workflow", "5", [], env)


async def test_an_environment_sees_no_key_of_the_runner(
    tmp_path: Path, worlds: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"DOCKER_HOST", "JAVA_HOME", "LD_LIBRARY_PATH"}
    for name in ("TRINITY_MQ_BROKER_URL", "OPENAI_API_KEY", "HF_TOKEN", "LC_TIME", *places):
        monkeypatch.setenv(name, "secret")
    noted = tmp_path / "noted"  # sitecustomize runs at the start of each Python with that PYTHONPATH
    (tmp_path / "sitecustomize.py").write_text(f"import os; print(*os.environ, file=open({str(noted)!r}, 'a'))")
    env = {**worlds, "COLOUR": "blue"}
    assert ScienceWorldArguments(env=env).missing() == []
    await play("sciworld_workflow", BOIL, [action("end")], env)
    needed = {"HOME", "LANG", "PATH", "TMPDIR", "TZ"}
    for names in noted.read_text().splitlines():
        assert {"COLOUR", "PYTHONPATH", "LC_TIME", *places} <= set(names.split())
        others = set(names.split()) - needed - places
        assert not [name for name in others if not name.startswith(("COLOUR", "LC_", "PYTHON"))]
    assert len(noted.read_text().splitlines()) == 2


async def test_alfworld_is_worth_its_end(game: str, worlds: dict[str, str]) -> None:
    [won], asked = await play("alfworld_workflow", game, [action("look"), action("take mug 1")], worlds)
    assert asked[0].startswith(f"<|im_start|>system\n{prompts.ALFWORLD}<|im_end|>\n")
    hint = "Please check if the action you take is valid or you have carefully followed the action format."
    assert users(asked[1]) == [
        "Observation: -= Welcome =- AlfredDemangler, AlfredExpert",
        f"Observation: Nothing happens.{hint}",
    ]
    assert (won.reward, won.metrics["env_rounds"], won.metrics["env_done"]) == (1.0, 1.0, 1.0)
    [lost], _ = await play("alfworld_workflow", game, ["?"] * 2, worlds, max_env_steps=2)
    assert (lost.reward, lost.metrics["env_rounds"], lost.metrics["env_done"]) == (-0.1, 1.0, 0.0)


async def test_steps_of_alfworld_have_what_gigpo_compares(game: str, worlds: dict[str, str]) -> None:
    steps, asked = await play("step_wise_alfworld_workflow", game, [action("look"), action("take mug 1")], worlds)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in users(asked[1])]
    assert [step.info["env_state_hash"] for step in steps] == digests
    assert [step.info["step_reward"] for step in steps] == [0.0, 1.0]
    assert [(step.eid.step, step.reward, step.metrics["actual_env_steps"]) for step in steps] == [
        (0, 1.0, 2),
        (1, 1.0, 2),
    ]


@pytest.mark.parametrize(("name", "reward"), [("alfworld_workflow", 0.0), ("step_wise_alfworld_workflow", -0.1)])
async def test_a_game_that_the_context_cuts_has_the_reward_of_trinity(
    game: str, worlds: dict[str, str], name: str, reward: float
) -> None:
    limit = len(prompts.ALFWORLD) + 300
    played, asked = await play(name, game, [action("x" * 400)], worlds, limit=limit)
    assert len(asked) == 1
    assert [(step.reward, step.truncate_status) for step in played] == [(reward, None), (reward, "prompt_truncated")]
    assert played[-1].metrics["prompt_too_long"] == 1.0


def parts(command: str) -> str:
    return f"<experience>know</experience>\n<think>so</think>\n<action>{command}</action>"


def is_trained(experience: Experience) -> bool:
    assert experience.action_mask is not None
    return bool(experience.action_mask.any())


async def test_raft_trains_on_success_alone(game: str, worlds: dict[str, str]) -> None:
    won = [parts("look"), parts("take mug 1")]
    [trained], asked = await play("RAFT_alfworld_workflow", game, won, worlds)
    assert asked[0].startswith(f"<|im_start|>system\n{prompts.RAFT_ALFWORLD}<|im_end|>\n")
    assert (trained.reward, trained.metrics["success"], is_trained(trained)) == (1.0, 1.0, True)
    for answers in ([parts("look")] * 3, [action("take mug 1")] * 3):  # repeated; an answer without its parts
        [masked], _ = await play("RAFT_alfworld_workflow", game, answers, worlds)
        assert (masked.reward, masked.metrics["steps"], is_trained(masked)) == (0.0, 3.0, False)
    [evaluated], _ = await play("RAFT_alfworld_workflow", game, won, worlds, is_eval=True)
    assert (evaluated.reward, evaluated.metrics["success"]) == (1.0, 1.0)


async def test_raft_with_reflection_trains_on_the_better_second_attempt(game: str, worlds: dict[str, str]) -> None:
    said = [*[parts("look")] * 3, parts("take mug 1")]
    [trained], asked = await play("RAFT_reflect_alfworld_workflow", game, said, worlds, at_once=1)
    told = "In your attempt, you stopped after 3 steps with a reward of 0.000 without completing the task."
    assert told in asked[3]
    assert "This is your second attempt." in asked[3]
    assert trained.metrics | {"improvement": 1.0, "second_reward": 1.0, "second_steps": 1.0} == trained.metrics
    assert is_trained(trained)
    assert len(trained.tokens) < len(asked[3].encode())  # without the first attempt
    [masked], _ = await play(
        "RAFT_reflect_alfworld_workflow", game, [*[parts("look")] * 3, *[parts("go")] * 50], worlds
    )
    assert not is_trained(masked)


@pytest.mark.parametrize("name", ["RAFT_alfworld_workflow", "RAFT_reflect_alfworld_workflow"])
async def test_an_attempt_that_the_context_cuts_is_masked(name: str, game: str, worlds: dict[str, str]) -> None:
    limit = len(prompts.RAFT_ALFWORLD) + 300
    [masked], asked = await play(name, game, [parts("x" * 200)], worlds, limit=limit)
    assert len(asked) == 1
    assert (is_trained(masked), masked.truncate_status) == (False, None)


@pytest.fixture
def games(tmp_path: Path) -> Path:
    """A folder with a game, and links out of it."""
    folder = tmp_path / "games"
    (folder / "inside").mkdir(parents=True)
    for path in (folder / "inside" / "game.z8", tmp_path / "outside.z8"):
        path.write_text("open chest;4")
    (folder / "link.z8").symlink_to(tmp_path / "outside.z8")
    (folder / "linked").symlink_to(tmp_path)
    return folder


@pytest.mark.parametrize("name", ["inside/game.z8", "{games}/inside/game.z8"])
async def test_textworld_is_worth_its_share_of_the_score(games: Path, worlds: dict[str, str], name: str) -> None:
    said = [action("look"), action("open chest")]
    [won], asked = await play("textworld_workflow", name.format(games=games), said, worlds, games=str(games))
    assert asked[0].startswith(f"<|im_start|>system\n{prompts.TEXTWORLD}<|im_end|>\n")
    assert (won.reward, won.metrics["success"], won.metrics["env_rounds"]) == (1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside.z8", "'../outside.z8' is not in the folder"),
        ("{games}/../outside.z8", "is not in the folder"),
        ("link.z8", "'link.z8' is not in the folder"),
        ("linked/outside.z8", "is not in the folder"),
        ("/etc/passwd", "'/etc/passwd' is not in the folder"),
        ("none.z8", "there is no game 'none.z8' in"),
        ("inside", "there is no game 'inside' in"),
        ("\0", "the record names the game '.x00'"),
        ("\ud800", "the record names the game '.ud800'"),
        ("", "wanted the path of a game in workflow_args.games"),
    ],
)
async def test_a_record_chooses_only_among_the_games_of_the_folder(
    games: Path, worlds: dict[str, str], name: str, words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        await play("textworld_workflow", name.format(games=games), [], worlds, games=str(games))


async def test_webshop_refuses_what_the_page_does_not_have(worlds: dict[str, str]) -> None:
    said = [action(text) for text in ("click[b01]", "search[Red Shoe]", "search[x]", "click[b01]", "click[Buy Now]")]
    [bought], asked = await play("webshop_workflow", "5", said, worlds, num_products=1000)
    shown = users(asked[-1])
    assert shown[0] == "Observation: page search, 1 sessions"
    assert "The buttons you can click now are: ['search']" in shown[1]
    assert "without search bar" in shown[3]
    assert (bought.reward, bought.metrics["env_rounds"], bought.metrics["env_done"]) == (0.75, 4.0, 1.0)
    [nothing], asked = await play("webshop_workflow", "5", ["?"] * 15, worlds, num_products=1000)
    assert users(asked[0]) == ["Observation: page search, 1 sessions"]  # that of the purchase is over
    assert nothing.reward == -0.1
    for prompt, words in (("10", "session 10 does not exist"), ("five", "wanted the number of a task")):
        with pytest.raises(TaskError, match=words):
            await play("webshop_workflow", prompt, [], worlds, num_products=1000)


async def test_intercode_is_worth_its_last_result(tmp_path: Path, worlds: dict[str, str]) -> None:
    (tmp_path / "tasks.json").write_text("tasks")
    arguments = {"data_path": str(tmp_path / "tasks.json")}
    said = [action("SELECT 1"), "no action", action("SELECT COUNT(*) FROM t"), action("submit")]
    [right], asked = await play("intercode_sql_workflow", 3, said, worlds, **arguments)
    assert users(asked[-1]) == [
        "Question: How many rows?\nDatabase: shop3\nObservation: ready",
        "Observation: [(7,)]",
        "Observation: Invalid action. Wrap one SQL statement or submit with <action></action>.",
        "Observation: [(7,)]",
    ]
    assert (right.reward, right.metrics["env_rounds"], right.metrics["env_done"]) == (1.0, 3.0, 1.0)
    [submitted], _ = await play(
        "intercode_sql_workflow", 3, [action("SELECT COUNT(*) FROM t")], worlds, max_env_steps=1, **arguments
    )
    assert (submitted.reward, submitted.metrics["env_rounds"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "read", "closed"),
    [
        ("<action> go </action> <action>b</action>", "go", "go"),
        ("<action>go", "go", ""),
        ("<action>a<action>b</action>", "a", "a<action>b"),
        ("go", "", ""),
        ("<action>" * 100_000, "", ""),
    ],
)
def test_actions_are_read_as_in_trinity(answer: str, read: str, closed: str) -> None:
    assert (read_action(answer), read_closed_action(answer)) == (read, closed)


def test_purchases_and_parts_are_read_in_time_linear_in_the_answer() -> None:
    assert split_purchase("search[Red [Shoe]]") == ("search[Red ", "shoe]")
    assert split_purchase("click[Buy Now]\nclick[x]") == ("click", "buy now")
    assert split_purchase("[x]") == ("[x]", "")
    assert split_purchase("[" * 100_000 + "]") == ("[" * 99_998, "[")
    assert refused_purchase("search", True, []).startswith("Invalid action, please type in the query")
    assert refused_purchase("buy", True, []).startswith("Invalid action. You should wrap")
    assert read_parts("<experience>" * 100_000) == ("", "", "")
    assert read_parts("<think>x</think><action>y</action>") == ("", "", "")
    assert read_parts(parts("go")) == ("know", "so", "go")


SCIENCEWORLD = os.environ.get("TRINITY_MQ_SCIENCEWORLD_PYTHON", "")
TEXTWORLD = os.environ.get("TRINITY_MQ_TEXTWORLD_PYTHON", "")
REAL_ALFWORLD = os.environ.get("TRINITY_MQ_ALFWORLD_PYTHON", "")


async def make_game(*command: str) -> None:
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("worlds")  # closes the processes
@pytest.mark.skipif(not SCIENCEWORLD, reason="TRINITY_MQ_SCIENCEWORLD_PYTHON names no Python with scienceworld")
async def test_the_real_scienceworld() -> None:
    said = [action(text) for text in ("teleport to kitchen", "focus on nothing at all", "look around")]
    [experience], asked = await play("sciworld_workflow", BOIL, said, {}, python=SCIENCEWORLD, max_env_steps=3)
    first, second, _ = users(asked[-1])
    assert first.startswith("Observation: \nTask Description: Your task is to boil ")
    assert second == "Observation: \nYou teleport to the kitchen."
    assert experience.metrics["golden_rounds"] > 5
    assert experience.reward is not None
    assert 0 <= experience.reward < 1


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("worlds")
@pytest.mark.skipif(not TEXTWORLD, reason="TRINITY_MQ_TEXTWORLD_PYTHON names no Python with textworld")
async def test_the_real_textworld(tmp_path: Path) -> None:
    game = tmp_path / "game.z8"
    make = [str(Path(TEXTWORLD).with_name("tw-make")), "tw-simple", "--rewards", "dense", "--goal", "detailed"]
    await make_game(*make, "--output", str(game), "--seed", "1")
    walkthrough = json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    said = [action(text) for text in walkthrough]
    [won], asked = await play("textworld_workflow", str(game), said, {}, python=TEXTWORLD)
    assert (won.reward, won.metrics["success"], won.metrics["env_rounds"]) == (1.0, 1.0, len(walkthrough))
    assert "-= " in users(asked[0])[0]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("worlds")
@pytest.mark.skipif(not REAL_ALFWORLD, reason="TRINITY_MQ_ALFWORLD_PYTHON names no Python with alfworld and textworld")
async def test_the_real_alfworld(tmp_path: Path) -> None:
    await make_game(REAL_ALFWORLD, "-c", ALFWORLD_GAME, str(tmp_path))
    moves = ("go to desk 1", "take mug 1 from desk 1", "go to shelf 1", "fly", "move mug 1 to shelf 1")
    said, path = [action(move) for move in moves], str(tmp_path / "game.tw-pddl")
    steps, asked = await play("step_wise_alfworld_workflow", path, said, {}, python=REAL_ALFWORLD)
    shown = users(asked[-1])
    assert "you see a desk 1, and a shelf 1.\n\nYour task is to: put " in shown[0]
    assert shown[1] == "Observation: You arrive at desk 1. On the desk 1, you see a mug 1."
    assert shown[4].startswith("Observation: Nothing happens.Please check if the action you take is valid")
    assert [step.info["step_reward"] for step in steps] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert {step.reward for step in steps} == {1.0}
