"""ScienceWorld, TextWorld, WebShop and InterCode-SQL: worlds of text, each in a process with a Python of its own.

The workflows have the prompts, actions, rewards and step limits of Trinity-RFT's workflows with the same names, so that
results compare. Trinity-RFT has no workflow for TextWorld.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.workflows.environments.children import (
    ChildArguments,
    ChildEnvironment,
    ChildWorkflow,
    GameFileArguments,
    GameFileWorkflow,
)
from trinity_mq.workflows.environments.conversation import EpisodeConversation, read_action
from trinity_mq.workflows.environments.prompts import INTERCODE_SQL, SCIENCEWORLD, TEXTWORLD, WEBSHOP
from trinity_mq.workflows.workflow import Task, TaskError

MAX_DESCRIPTION = 10_000
"""Maximum characters of a task's description that is parsed as JSON."""


def shown(observation: str) -> str:
    """Return an observation as the model reads it in most of these worlds."""
    return f"Observation: {observation}"


def record_number(task: Task) -> int:
    """Return the prompt of a record as a number, or 0 if the prompt is missing.

    Raises:
        TaskError: The prompt is not a number.
    """
    text = "0" if task.task_desc is None else str(task.task_desc).strip()
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise TaskError(
            f"the record's {task.format_args.prompt_key!r} is {text[:80]!r}, wanted the number of a task; name its key "
            "with format.prompt_key"
        )
    return int(text)


class ScienceWorldArguments(ChildArguments):
    """Arguments of :class:`SciWorldWorkflow`."""

    world = "scienceworld"
    max_env_steps: int = Field(default=30, ge=1, le=1000)
    """Maximum answers of the model in one run."""
    simplification: str = "easy"
    """Simplifications of ScienceWorld, separated by commas."""


class SciWorldWorkflow(ChildWorkflow):
    """A task of ScienceWorld. The record's prompt is JSON with ``task_name`` and ``var_num``. The reward is the highest
    score of the episode, from 0 to 1.

    Data do not choose programs, so ``jar_path`` of a record has no effect: the installed package has the Java archive.
    """

    arguments_kind = ScienceWorldArguments

    def _first(self) -> Mapping[str, Any]:
        text = str(self.task.task_desc or "")
        try:
            record = json.loads(text) if len(text) <= MAX_DESCRIPTION else None
        except (ValueError, RecursionError):
            record = None
        name, variation = (record.get("task_name"), record.get("var_num")) if isinstance(record, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(variation, int):
            raise TaskError(
                f"the record's {self.task.format_args.prompt_key!r} is {text[:80]!r}, wanted JSON such as "
                '{"task_name": "boil", "var_num": 0}; name its key with format.prompt_key'
            )
        arguments: ScienceWorldArguments = self.arguments
        return {
            "task_name": name,
            "variation": variation,
            "simplification": arguments.simplification,
            "step_limit": 100,
        }

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        first, show = environment.first, "Observation: \n{}".format
        conversation = EpisodeConversation(self.model, SCIENCEWORLD)
        text = show(f"Task Description: {first['task']}\n{first['observation']}")
        score = best = 0.0
        done = False
        async for state in self._states(environment, conversation, text, show):
            score, done = score + state["reward"], state["done"]
            best = max(best, score)
        info = {"env_rounds": conversation.last_round, "env_done": int(done), "golden_rounds": first["golden_rounds"]}
        return conversation.experiences(best / 100.0, info, self.run_id_base)


class TextWorldArguments(GameFileArguments):
    """Arguments of :class:`TextWorldWorkflow`."""

    world = "textworld"
    max_env_steps: int = Field(default=50, ge=1, le=1000)
    """Maximum answers of the model in one run."""


class TextWorldWorkflow(GameFileWorkflow):
    """A game of TextWorld, made with ``tw-make``. The record's prompt is the path of its file in ``games``. The reward
    is the last score as a share of the maximum score.
    """

    arguments_kind = TextWorldArguments

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        first = environment.first
        most = first["max_score"] or 1.0
        conversation = EpisodeConversation(self.model, TEXTWORLD)
        score, done, rounds = 0.0, False, 0
        async for state in self._states(environment, conversation, shown(first["observation"]), shown):
            score, done, rounds = state["reward"], state["done"], rounds + 1
        info = {"env_rounds": rounds, "env_done": int(done), "success": float(score >= most)}
        return conversation.experiences(score / most, info, self.run_id_base)


class WebShopArguments(ChildArguments):
    """Arguments of :class:`WebShopWorkflow`."""

    world = "webshop"
    is_shared = True
    max_env_steps: int = Field(default=15, ge=1, le=1000)
    """Maximum answers of the model in one run."""
    num_products: int | None = Field(default=None, ge=1)
    """Number of products: 1000 or 100000. None: all, which take about 15 GB of memory once for each runner."""
    step_seconds: float = Field(default=1800.0, gt=0)
    """Time limit in seconds of one action, and of making an environment: for the first environment the products are
    loaded.
    """


class WebShopWorkflow(ChildWorkflow):
    """A purchase in WebShop. The record's prompt is the number of WebShop's session. The purchase gives the reward;
    without a purchase the reward is -0.1.
    """

    arguments_kind = WebShopArguments

    def _first(self) -> Mapping[str, Any]:
        return {"session": record_number(self.task), "num_products": self.arguments.num_products}

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        conversation = EpisodeConversation(self.model, WEBSHOP)
        self._page = environment.first
        reward, done = -0.1, False
        async for state in self._states(environment, conversation, shown(self._page["observation"]), shown):
            if state["done"]:
                reward, done = state["reward"], True
        info = {"session_id": record_number(self.task), "env_rounds": conversation.last_round, "env_done": int(done)}
        return conversation.experiences(reward, info, self.run_id_base)

    async def _act(self, environment: ChildEnvironment, answer: str) -> Mapping[str, Any]:
        action = read_action(answer)
        refusal = refused_purchase(action, bool(self._page["search_bar"]), self._page["clickables"])
        if refusal:
            return {"observation": refusal, "done": False}
        self._page = await environment.step(action)
        return self._page


def refused_purchase(action: str, search_bar: bool, clickables: Sequence[str]) -> str:
    """Return the message to the model if WebShop's current page does not allow an action. Empty: the page allows it.

    The sentences are part of the task; source: Trinity-RFT 0.6.0, Apache-2.0.
    """
    name, argument = split_purchase(action)
    if name == "search" and argument and search_bar:
        return ""
    if name == "click" and argument in clickables:
        return ""
    if name == "search" and not argument:
        return "Invalid action, please type in the query you want to search in the square brackets here."
    if name == "search":
        return "Can not perform search action without search bar. Please click the Back to Search button first."
    if name == "click":
        return (
            "Incorrect action format, make sure you have the correct button name that is **within the current page**. "
            f"The buttons you can click now are: {list(clickables)}"
        )
    return "Invalid action. You should wrap your action with the <action> </action> tag and follow the action format."


def split_purchase(action: str) -> tuple[str, str]:
    """Return the name of an action ``name[argument]``, and its argument in small letters. Return the whole action and
    "" if its first line does not have this form.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 0, max(end - 1, 0))
    return (line[:start], line[start + 1 : end].lower()) if start > 0 else (action, "")


class InterCodeArguments(ChildArguments):
    """Arguments of :class:`InterCodeSQLWorkflow`."""

    world = "intercode_sql"
    is_shared = True
    data_path: str
    """File of InterCode's tasks, ``ic_spider_dev.json``."""
    image_name: str = "docker-env-sql"
    """Image of the database server in Docker."""
    max_env_steps: int = Field(default=10, ge=1, le=1000)
    """Maximum answers of the model in one run."""
    auto_submit: bool = True
    """Submit the last result at the limit of steps if the model has not done so."""
    verbose: bool = False
    """Has no effect: prints of the environment are never shown."""


class InterCodeSQLWorkflow(ChildWorkflow):
    """A question to a database of InterCode. The record's prompt is the number of the task. The last result
    gives the reward.
    """

    arguments_kind = InterCodeArguments

    def _first(self) -> Mapping[str, Any]:
        arguments: InterCodeArguments = self.arguments
        number = record_number(self.task)
        return {"query_idx": number, "data_path": arguments.data_path, "image_name": arguments.image_name}

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        first, record = environment.first, self.task.raw_task
        query, database = first["query"] or record.get("query", ""), record.get("db") or first["db"]
        text = f"Question: {query}\nDatabase: {database}\n{shown(first['observation'])}"
        conversation = EpisodeConversation(self.model, INTERCODE_SQL)
        reward, done, executed = 0.0, False, False
        async for state in self._states(environment, conversation, text, shown):
            reward, done, executed = state.get("reward", reward), state["done"], state["executed"]
        rounds = conversation.last_round if done else self.arguments.max_env_steps
        if not done and self.arguments.auto_submit and not conversation.cut:
            state = await environment.step("submit")
            reward, done, executed = state["reward"], state["done"], state["executed"]
        info = {
            "query_idx": record_number(self.task),
            "env_rounds": rounds,
            "env_done": int(done),
            "action_executed": int(executed),
            "final_reward": reward,
        }
        return conversation.experiences(reward, info, self.run_id_base)

    async def _act(self, environment: ChildEnvironment, answer: str) -> Mapping[str, Any]:
        action = read_closed_action(answer)
        if action:
            return await environment.step(action)
        # the sentence is part of the task; source: Trinity-RFT 0.6.0, Apache-2.0
        refusal = "Invalid action. Wrap one SQL statement or submit with <action></action>."
        return {"observation": refusal, "done": False, "executed": False}


def read_closed_action(answer: str) -> str:
    """Return the text between the first ``<action>`` and the next ``</action>``. Return "" if the answer lacks them."""
    _, _, rest = answer.partition("<action>")
    text, closed, _ = rest.partition("</action>")
    return text.strip() if closed else ""
