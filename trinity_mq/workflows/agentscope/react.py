"""AgentScope's ReAct agent on mathematics, and on questions that a search of the web answers.

The workflows have the prompts, tools and rewards of Trinity-RFT's workflows with the same names.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from trinity_mq.experience import Experience
from trinity_mq.rewards import create_reward, parts_of
from trinity_mq.workflows.agentscope.adapter import (
    AgentScopeArguments,
    AgentScopeWorkflow,
    ReActArguments,
    react_agent,
    reply_of,
)
from trinity_mq.workflows.auxiliary import auxiliary_index
from trinity_mq.workflows.builtin.judging import JUDGE, judge_answer
from trinity_mq.workflows.builtin.tools import shortened
from trinity_mq.workflows.errors import SandboxFailed
from trinity_mq.workflows.sessions.sandbox import Sandbox, interpreter, read_text
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

# quoted from Trinity-RFT 0.6.0, Apache-2.0: trinity/common/workflows/agentscope/react/templates.py
MATH_PROMPT = (
    "You are an agent specialized in solving math problems with tools. Please solve the math problem given to you. You "
    "can write and execute Python code to perform calculation or verify your answer. You should return your final "
    "answer within \\boxed{{}}."
)
# quoted from Trinity-RFT 0.6.0, Apache-2.0: trinity/common/workflows/envs/agentscope/agentscopev1_search_workflow.py
SEARCH_PROMPT = (
    "You are a Web Information Seeking Master. Your task is to thoroughly seek the internet for information and "
    "provide accurate answers to questions."
)
# quoted from Trinity-RFT 0.6.0, Apache-2.0, from the same file
JUDGE_PROMPT = """\
Judge whether the following [response] to [question] is correct or not based on the [correct_answer] below.

[question]: {question}

[response]: {response}

[correct_answer]: {truth}

Your judgement must be in the format and criteria specified below:

1. **Reasoning**: Explain why the [response] is correct or incorrect based on [correct_answer], focusing only on if there are meaningful differences between [correct_answer] and the response. Do not comment on any background to the problem, do not attempt to solve the problem, do not argue for any answer different than [correct_answer], focus only on whether the answers match.

2. **Correctness**: Answer exactly "YES" if [response] matches the [correct_answer] given above, or is within a small margin of error for numerical problems and small format issue for text problems (for example, with or without a hyphen should be considered the same). Answer exactly "NO" otherwise, i.e. if there if there is any inconsistency, ambiguity, non-equivalency, or if the [response] is incorrect.
"""  # noqa: E501 - a quotation
CODE_SECONDS = 300.0
"""Maximum seconds of a program that the model wrote."""
MAX_OUTPUT = 20_000
"""Maximum characters of a program's output, and of its errors, that the model reads."""


class MathAnswer(BaseModel):
    """The final answer of an agent. Its description is part of the task; source: Trinity-RFT 0.6.0, Apache-2.0."""

    result: str = Field(
        description="Your solution of the given math problem. Put your final answer in boxed format, e.g., \\boxed{42}"
    )


class SearchAnswer(BaseModel):
    """The final answer of an agent. Its description is part of the task; source: Trinity-RFT 0.6.0, Apache-2.0."""

    result: str = Field(description="The final result to the initial user query")


def result_of(message: Any) -> str:
    """Return the final answer in a message: the result in its metadata, else its content. Empty without a message."""
    metadata = getattr(message, "metadata", None)
    if isinstance(metadata, Mapping) and "result" in metadata:
        return str(metadata["result"])
    if message is None:
        return ""
    return str(message.content)


def bare_truth(truth: Any) -> str | None:
    """Return the answer after ``####``, as GSM8K marks it, else the whole truth. None remains None: every answer is
    then wrong.
    """
    if truth is None:
        return None
    text = str(truth)
    return text.split("####")[1].strip() if "####" in text else text


class MathReActArguments(AgentScopeArguments):
    """Arguments of :class:`AgentScopeReActWorkflow`."""

    type: Literal["gsm8k"] = "gsm8k"
    """The kind of task."""


class AgentScopeReActWorkflow(AgentScopeWorkflow):
    """A ReAct agent that solves a problem of GSM8K and returns its answer in a box."""

    arguments_kind = MathReActArguments

    async def run_async(self) -> list[Experience]:
        """Run the agent once."""
        agent = react_agent(self.model, "react_agent", MATH_PROMPT, enable_meta_tool=True, max_iters=10)
        message = await reply_of(agent, self.task.task_desc, MathAnswer)
        metadata = getattr(message, "metadata", None) or {}
        parts = boxed_parts(str(metadata.get("result", "")), self.task.truth)
        metrics = {"react_memory_length": float(len(agent.memory.content)), **parts}
        return self._recorded(sum(parts.values()), metrics, on_all=True)


class AgentScopeReactMathWorkflow(AgentScopeWorkflow):
    """A ReAct agent that solves a problem with Python, which it runs in a sandbox without network and secrets.

    The tool has the name, the description and the results of AgentScope's ``execute_python_code``.
    """

    async def run_async(self) -> list[Experience]:
        """Run the agent once.

        Raises:
            SandboxFailed: The sandbox failed.
        """
        from agentscope.memory import InMemoryMemory
        from agentscope.tool import Toolkit

        python, toolkit = SandboxedPython(), Toolkit()
        toolkit.register_tool_function(python.tool())
        prompt = f"\n{MATH_PROMPT}\n"
        agent = react_agent(self.model, "math_react_agent", prompt, toolkit=toolkit, memory=InMemoryMemory())
        message = await reply_of(agent, self.task.task_desc, MathAnswer)
        if python.failed is not None:
            raise python.failed
        parts = boxed_parts(result_of(message), self.task.truth)
        metrics = {"react_memory_length": float(len(agent.memory.content))}
        return self._recorded(sum(parts.values()), metrics, on_all=True)


def boxed_parts(response: str, truth: Any) -> dict[str, float]:
    """Return the parts of the reward of a boxed answer."""
    return parts_of(create_reward("math_boxed_reward", {}), response, bare_truth(truth), finished=True)


class SandboxedPython:
    """AgentScope's tool ``execute_python_code``, with its programs in a sandbox."""

    def __init__(self) -> None:
        self.failed: SandboxFailed | None = None
        """The error of the sandbox. None: the sandbox has not failed."""

    def tool(self) -> Any:
        """Return the tool, described as AgentScope describes its own."""
        from agentscope.message import TextBlock
        from agentscope.tool import ToolResponse, execute_python_code

        @functools.wraps(execute_python_code)
        async def execute(code: str, timeout: float = CODE_SECONDS, **_: Any) -> ToolResponse:
            text = await self.run(str(code), min(CODE_SECONDS, max(1.0, float(timeout))))
            return ToolResponse(content=[TextBlock(type="text", text=text)])

        return execute

    async def run(self, code: str, seconds: float) -> str:
        """Run a program; return its exit code, output and errors in AgentScope's form.

        Raises:
            SandboxFailed: The sandbox failed.
        """
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="trinity-mq-code-"))
        sandbox = Sandbox(folder)
        try:
            await asyncio.to_thread(sandbox.prepare, {"code.py": code})
            sandbox.socket.touch()  # nothing listens at it
            command = ["/bin/sh", "-c", 'exec "$0" -I -u code.py >stdout 2>stderr', interpreter()]
            ended = await sandbox.run(command, {"PYTHONUTF8": "1"}, 0, seconds)
            texts = [await asyncio.to_thread(read_text, sandbox.work, name) for name in ("stdout", "stderr")]
            if texts[0] is None:  # not even the shell ran
                raise SandboxFailed(f"no program can run in the sandbox: {ended.output}")
        except SandboxFailed as error:
            self.failed = error
            raise
        finally:
            await asyncio.shield(sandbox.remove())
        output, errors = (shortened(text or "", MAX_OUTPUT) for text in texts)
        code_text = -1 if ended.code is None else ended.code
        if ended.code is None:
            late = f"TimeoutError: The code execution exceeded the timeout of {seconds:g} seconds."
            errors = f"{errors}\n{late}" if errors else late
        return f"<returncode>{code_text}</returncode><stdout>{output}</stdout><stderr>{errors}</stderr>"


class SearchArguments(ReActArguments):
    """Arguments of :class:`AgentScopeV1ReactSearchWorkflow`."""

    search_client_type: Literal["searxng", "tavily"] = "searxng"
    """The search: a SearXNG at the address ``SEARXNG_URL``, or Tavily with the key ``TAVILY_API_KEY``. Set the variable
    in ``runner.env``.
    """
    max_model_tokens: int = Field(default=24000, ge=1)
    """Experiences with more tokens are left out. If all have more, the first remains."""


SEARCHES = {
    "searxng": ("SEARXNG_URL", ["-y", "mcp-searxng"]),
    "tavily": ("TAVILY_API_KEY", ["-y", "tavily-mcp@latest"]),
}
"""For each search: the environment variable that it needs, and the arguments with which ``npx`` starts its MCP server.
"""


class AgentScopeV1ReactSearchWorkflow(AgentScopeWorkflow):
    """A ReAct agent that answers a question with a search of the web. The first auxiliary model judges its answer:
    reward 1 if it is right, else 0. ``npx`` starts the search's MCP server.
    """

    arguments_kind = SearchArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._variable, self._npx = SEARCHES[self.arguments.search_client_type]
        if not os.environ.get(self._variable):
            raise TaskError(
                f"the environment variable {self._variable} is not set, and workflow_args.search_client_type is "
                f"{self.arguments.search_client_type!r}; set it in runner.env"
            )
        self._judge_index = auxiliary_index(self, 0, JUDGE)

    async def run_async(self) -> list[Experience]:
        """Run the agent once.

        Raises:
            SandboxFailed: The search's server could not be started.
            AuxiliaryError: The judge cannot be reached.
        """
        from agentscope.mcp import StdIOStatefulClient
        from agentscope.memory import InMemoryMemory

        agent = react_agent(
            self.model, "Friday", SEARCH_PROMPT, memory=InMemoryMemory(), max_iters=self.arguments.max_turns
        )
        env = {self._variable: os.environ[self._variable]}
        search = StdIOStatefulClient(name="search", command="npx", args=self._npx, env=env)
        try:
            try:
                await search.connect()
                await agent.toolkit.register_mcp_client(search)
            except Exception as error:  # from the server, from npx, or from the protocol
                raise SandboxFailed(f"the search's MCP server has not started: {error}", kind="tool") from error
            message = await reply_of(agent, self.task.task_desc, SearchAnswer)
        finally:
            if search.is_connected:
                await search.close()
        reward = 0.0 if message is None else float(await self._is_right(result_of(message)))
        metrics = {"react_turns": float(len(agent.memory.content) // 2), "max_turns": float(self.arguments.max_turns)}
        experiences = self._recorded(reward, metrics, on_all=True)
        most = self.arguments.max_model_tokens
        short = [experience for experience in experiences if len(experience.tokens) <= most]
        return short or experiences[:1]

    async def _is_right(self, answer: str) -> bool:
        question, truth = self.task.task_desc, self.task.truth
        messages = [
            {"role": "system", "content": "You evaluate correctness."},
            {"role": "user", "content": JUDGE_PROMPT.format(question=question, response=answer, truth=truth)},
        ]
        return says_right(await judge_answer(self, self._judge_index, messages))


def says_right(verdict: str) -> bool:
    """Return whether a line of a verdict has ``YES`` after ``Correctness``, in small or capital letters."""
    lines = (line.partition("correctness") for line in verdict.lower().splitlines())
    return any("yes" in rest for _, _, rest in lines)
