"""Runs agents of AgentScope on the trained model: the model in AgentScope's form, and experiences from its answers.

The workflows have the names, arguments and rewards of Trinity-RFT.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from trinity_mq.experience import Experience
from trinity_mq.runtime.plugins import resolve
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.errors import RunFailedError
from trinity_mq.workflows.step_wise import prompt_too_long
from trinity_mq.workflows.workflow import Task, TaskError, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

EXTRA = "AgentScope 1.x is not installed: pip install 'trinity-mq[agentscope]'"
MAX_TOKENS = 4096
"""Maximum tokens of an answer if the configuration has no limit."""


class AgentScopeArguments(Arguments):
    """Arguments of all workflows of AgentScope."""

    def missing(self) -> list[str]:
        return [] if importlib.util.find_spec("agentscope") else [EXTRA]


class AgentScopeWorkflow(Workflow):
    """Base of workflows that run agents of AgentScope. Each answer of the model is an experience."""

    is_async = True
    needs_history = True
    arguments_kind: ClassVar[type[AgentScopeArguments]] = AgentScopeArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: Any = arguments_of(task, self.arguments_kind)
        if reasons := self.arguments.missing():
            raise TaskError(reasons[0])

    def _recorded(self, reward: float, metrics: Mapping[str, float], *, on_all: bool = False) -> list[Experience]:
        """Return the recorded answers with a reward.

        Args:
            reward: Reward of the run.
            metrics: Metrics of the run, for the last experience.
            on_all: Give the metrics to all experiences.

        Raises:
            RunFailedError: The agent has not asked the model.
        """
        experiences: list[Experience] = self.model.extract_experience_from_history()
        if not experiences:
            raise RunFailedError("the agent has not asked the model: it must use the model that the workflow gives it")
        for step, experience in enumerate(experiences):
            experience.eid.run, experience.eid.step = self.run_id_base, step
            experience.reward = reward
        for experience in experiences if on_all else experiences[-1:]:
            experience.metrics = {**(experience.metrics or {}), **metrics}
        return experiences


def chat_model(model: ModelWrapper) -> Any:
    """Return a model as AgentScope's ``OpenAIChatModel``. Its calls have the sampling parameters of ``model``, and they
    are recorded.
    """
    from agentscope.model import OpenAIChatModel

    limit = {} if model.sampling.get("max_tokens") else {"max_tokens": MAX_TOKENS}
    made = OpenAIChatModel(api_key="EMPTY", model_name=model.model_name, stream=False, generate_kwargs=limit)
    made.client = model.get_openai_async_client()
    return made


class AgentScopeAdapterArguments(AgentScopeArguments):
    """Arguments of the adapters. Only the configuration sets them, never a record."""

    workflow_func: Any = None
    """The function that runs the agent: its dotted path, such as ``my_agents.solve``, or the function itself."""
    judge_func: Any = None
    """The function that rewards the response: its dotted path, or the function itself. None: the agent's function
    gives the reward.
    """


class AgentScopeWorkflowAdapter(AgentScopeWorkflow):
    """Runs the user's ``workflow_func(task, model)``, which returns the reward, as for AgentScope 1.0.7 to 1.0.11."""

    arguments_kind = AgentScopeAdapterArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._run_agent = function_of("workflow_func", self.arguments.workflow_func)

    async def run_async(self) -> list[Experience]:
        """Run the agent.

        Raises:
            RunFailedError: The function returned no reward, or the agent has not asked the model.
        """
        reward = await self._run_agent(self.task.raw_task, chat_model(self.model))
        return self._recorded(reward_in("workflow_func", reward), {})


class AgentScopeWorkflowAdapterV1(AgentScopeWorkflowAdapter):
    """Runs the user's ``workflow_func(task, model)``, and ``judge_func(task, response)`` if it is set, as for
    AgentScope 1.0.12 and later. Both functions may take ``auxiliary_models``, models by name, and ``logger``. They
    return AgentScope's ``WorkflowOutput`` and ``JudgeOutput``, or objects with the same attributes.
    """

    async def run_async(self) -> list[Experience]:
        """Run the agent and the judge.

        Raises:
            UnknownNameError: The dotted path of the judge's function cannot be imported.
            TaskError: The judge's function is not asynchronous.
            RunFailedError: A function returned no reward, or the agent has not asked the model.
        """
        judge = self.arguments.judge_func
        judge_agent = None if judge is None else function_of("judge_func", judge)
        offered = {
            "auxiliary_models": {wrapper.model_name: chat_model(wrapper) for wrapper in self.auxiliary_model_wrappers},
            "logger": self.logger,
        }
        output = await call_with(self._run_agent, offered, task=self.task.raw_task, model=chat_model(self.model))
        metrics = dict(getattr(output, "metrics", None) or {})
        name = "workflow_func"
        if judge_agent is not None:
            response = getattr(output, "response", None)
            output = await call_with(judge_agent, offered, task=self.task.raw_task, response=response)
            metrics |= dict(getattr(output, "metrics", None) or {})
            name = "judge_func"
        return self._recorded(reward_in(name, getattr(output, "reward", None)), metrics)


def function_of(name: str, function: Any) -> Callable[..., Any]:
    """Return the asynchronous function that an argument holds or names.

    Raises:
        UnknownNameError: The dotted path cannot be imported.
        TaskError: The argument is not an asynchronous function.
    """
    resolved = resolve(f"workflow_args.{name}", function) if isinstance(function, str) else function
    if not inspect.iscoroutinefunction(resolved):
        raise TaskError(
            f"workflow_args.{name} is {resolved!r:.80}, wanted the dotted path of an async function, such as "
            "my_agents.solve"
        )
    return resolved  # type: ignore[no-any-return]


async def call_with(function: Callable[..., Any], offered: Mapping[str, Any], **arguments: Any) -> Any:
    """Call an asynchronous function with ``arguments``, and with the items of ``offered`` that it takes."""
    names = inspect.signature(function).parameters
    return await function(**arguments, **{name: value for name, value in offered.items() if name in names})


def reward_in(name: str, reward: Any) -> float:
    """Return the reward that a function gave.

    Raises:
        RunFailedError: The reward is not a number.
    """
    if isinstance(reward, bool | int | float):
        return float(reward)
    raise RunFailedError(
        f"workflow_args.{name} gave the reward {reward!r:.80}, wanted a number; "
        "the workflow or the judge function returns it"
    )


class ReActArguments(AgentScopeArguments):
    """Arguments of agents that reason and act."""

    max_turns: int = Field(default=10, ge=1, le=1000)
    """Maximum requests of the agent to the model."""


def react_agent(model: ModelWrapper, name: str, prompt: str, **settings: Any) -> Any:
    """Return AgentScope's ``ReActAgent`` on a model. It prints nothing."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter

    agent = ReActAgent(
        name=name, sys_prompt=prompt, model=chat_model(model), formatter=OpenAIChatFormatter(), **settings
    )
    agent.set_console_output_enabled(False)
    return agent


async def reply_of(agent: Any, question: Any, form: type[BaseModel]) -> Any:
    """Return an agent's reply to a question. None: the conversation became too long for the model."""
    from agentscope.message import Msg

    try:
        return await agent.reply(Msg("user", str(question or ""), role="user"), structured_model=form)
    except Exception as error:
        if not prompt_too_long(error):
            raise
        return None
