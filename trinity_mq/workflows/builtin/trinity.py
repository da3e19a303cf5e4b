r"""Single-turn workflows under the names of Trinity-RFT, with its prompts, rewards, metrics and arguments.

The prompts define tasks: a model that was trained with them is asked with the same words. They are taken from
Trinity-RFT 0.6.0 (Apache-2.0, https://github.com/agentscope-ai/Trinity-RFT), where the prompt of tool calls comes from
Tool-N1 (https://github.com/NVlabs/Tool-N1). :data:`trinity_mq.renamed.CHANGED_NAMES` lists the project's own workflows
that had these names before.

As in Trinity-RFT, an empty system prompt means no system prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.math.answers import compare
from trinity_mq.rewards.math.trinity_answers import tagged_texts
from trinity_mq.rewards.trinity_rewards import MathRewardFn
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.builtin.distill import DistillationArguments, DistillWorkflow
from trinity_mq.workflows.builtin.math import BoxedAnswerWorkflow, BoxedArguments, MathRmWorkflow
from trinity_mq.workflows.builtin.simple import SimpleWorkflow, question_of
from trinity_mq.workflows.workflow import Task, TaskError

# Prompts of Trinity-RFT 0.6.0, Apache-2.0.
TAGS_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n"
    "<answer> answer here </answer>.\n"
)
BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THOUGHTS_PROMPT = (
    "You are a helpful assistant that solves MATH problems. You should first thinks about the reasoning process in "
    "mind and then provides the user with the answer. You should present your reasoning process using the format: "
    "<think>\n ...your reasoning process here... </think>\n first. You should always include your final answer in "
    "\\boxed{} as closed-form results."
)
ASSISTANT_PROMPT = "You are a helpful assistant."
TOOLS_PROMPT = """# Tool

<tools>
{tools}
</tools>

In each action step, you MUST:
1. Think about the reasoning process in the mind and enclosed your reasoning within <think> </think> XML tags.
2. Then, provide a json object with function names and arguments within <tool_call></tool_call> XML tags. i.e., \
<tool_call>[{{"name": <function-name>, "arguments": <args-json-object>}}, {{"name": <function-name2>, "arguments": \
<args-json-object2>}}, ...]</tool_call>
3. Make sure both the reasoning and the tool call steps are included together in one single reply.
A complete reply example is: <think>To address the query, I need to send the email to Bob and then buy the banana \
through walmart. </think> <tool_call> [{{"name": "email", "arguments": {{"receiver": "Bob", "content": "I will bug \
banana through walmart"}}}}, {{"name": "walmart", "arguments": {{"input": "banana"}}}}]</tool_call>. Please make sure \
the type of the arguments is correct.
"""


def tags_prompt(workflow: SimpleWorkflow) -> str | None:
    """Return the system prompt of the task. Without it, return the prompt that asks for tags if the reward wants tags,
    else None.
    """
    system: str | None = workflow.format_args.system_prompt
    wants_tags = workflow.task.reward_fn in (None, "math_reward", MathRewardFn)
    return TAGS_PROMPT if system is None and wants_tags else system


class MathWorkflow(SimpleWorkflow):
    """Math problems with thoughts and answer in tags. The reward is ``math_reward``, unless the task has another."""

    _default_reward_fn = "math_reward"
    system_prompt = Replaceable(tags_prompt)


class AsyncMathWorkflow(MathWorkflow):
    """:class:`MathWorkflow` on the event loop."""

    is_async = True


class BoxedWorkflowArguments(BoxedArguments):
    """``workflow_args`` of boxed math."""

    format_score_coef: float = 0.1


class MathBoxedWorkflow(BoxedAnswerWorkflow):
    r"""Math problems with the answer in ``\boxed{}``: the reward is ``math_boxed_reward``, unless the task has another.
    A response that was cut at a limit is not trained on.
    """

    _default_reward_fn = "math_boxed_reward"
    arguments_kind = BoxedWorkflowArguments

    @Replaceable
    def system_prompt(self) -> str:
        """The system prompt of the taskset, else a prompt that asks for a box, and with ``with_think`` for thoughts."""
        system: str | None = self.format_args.system_prompt
        if system is not None:
            return system
        return THOUGHTS_PROMPT if self.with_think else BOXED_PROMPT

    def format_prompt(self) -> str:
        """Return instruction and problem as one text, for ``use_base``."""
        system = f"System:{self.system_prompt}\n" if self.system_prompt else ""
        return f"{system}User:\n{question_of(self)}\nAssistant:\n"

    def _base_prompt(self) -> str:
        return self.format_prompt()


class AsyncMathBoxedWorkflow(MathBoxedWorkflow):
    """:class:`MathBoxedWorkflow` on the event loop."""

    is_async = True


class MathRMWorkflow(MathRmWorkflow):
    """Problems whose reward is called as ``reward(experience, messages, ground_truth=truth)``, such as a reward model.
    It has no default system prompt.
    """

    _default_system_prompt = None


class AsyncMathRMWorkflow(MathRMWorkflow):
    """:class:`MathRMWorkflow` on the event loop; the reward runs in a thread."""

    is_async = True


EVALUATION_SAMPLING = {"temperature": 0.6, "top_p": 0.8, "n": 1}
"""Sampling of :class:`MathEvalWorkflow`, whatever the configuration says."""


def qwen_accuracy(response: Experience, truth: Any) -> float | None:
    """Return 1.0 if a response's answer equals ``truth`` by the rules of Qwen2.5-Math's evaluation, else 0.0. None
    without a truth.
    """
    wanted = truth_text(truth)
    return None if wanted is None else float(compare("qwen", response.response_text or "", wanted).right)


class MathEvalWorkflow(SimpleWorkflow):
    """Math problems as an evaluation by the rules of Qwen2.5-Math: metric ``accuracy``, and no reward.

    The problem is ``question`` of the record. The taskset's system prompt, reward function and sampling parameters are
    not used.
    """

    can_reset = False
    can_repeat = False

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: The record has no ``question``.
        """
        self.task = task
        if not isinstance(task.raw_task.get("question"), str):
            raise TaskError(
                f"the record has the keys {', '.join(map(str, task.raw_task))}; {type(self).__name__} needs the "
                "problem as question"
            )

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the evaluation."""
        return evaluation_messages(self.raw_task["question"])

    def _request_sampling(self) -> dict[str, Any]:
        return dict(EVALUATION_SAMPLING)

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        for response in responses:
            accuracy = qwen_accuracy(response, self.truth)
            if accuracy is not None:
                response.metrics["accuracy"] = accuracy
        return responses


class AsyncMathEvalWorkflow(MathEvalWorkflow):
    """:class:`MathEvalWorkflow` on the event loop."""

    is_async = True


def evaluation_messages(problem: str) -> list[dict[str, Any]]:
    """Return the messages that pose a problem, in the form of Qwen2.5-Math's evaluation."""
    return [
        {"role": "system", "content": ASSISTANT_PROMPT},
        {"role": "user", "content": f"{problem}\n{BOXED_PROMPT}"},
    ]


# -- a teacher


class TeacherArguments(DistillationArguments):
    """``workflow_args`` of distillation."""

    temperature: float = 1.0
    """Temperature of the teacher's log-probabilities."""


class OnPolicyDistillWorkflow(DistillWorkflow):
    """A teacher scores each token of the answers. The reward is 0. The metric ``kl_divergence`` is log p (student) -
    log q (teacher), summed over the tokens of a response.
    """

    is_async = True
    arguments_kind = TeacherArguments
    _arguments: TeacherArguments

    async def _dual_body(self) -> list[Experience]:
        """Ask the student, then the teacher; return one experience with ``teacher_logprobs`` for each run."""
        return await self._with_rewards(await self._scored_responses(self._arguments.temperature))

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        for response in responses:
            if response.logprobs is not None and response.teacher_logprobs is not None:
                response.metrics["kl_divergence"] = float((response.logprobs - response.teacher_logprobs).sum())
            response.reward = self.compute_reward(response)
        return self._numbered_responses(responses)

    def compute_reward(self, response: Experience) -> float:
        """Return the reward of a response."""
        return 0.0


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow):
    """:class:`OnPolicyDistillWorkflow` for math problems, asked and judged as in :class:`MathEvalWorkflow`: the reward
    and the metric ``accuracy`` are 1 for a right answer.
    """

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the evaluation."""
        return evaluation_messages(question_of(self))

    def compute_reward(self, response: Experience) -> float:
        """Return 1 for a right answer, else 0."""
        accuracy = qwen_accuracy(response, self.truth) if response.response_text else None
        if accuracy is None:
            return 0.0
        response.metrics["accuracy"] = accuracy
        return accuracy


# -- tools


class ToolCallWorkflow(SimpleWorkflow):
    """Tool selection in one turn, as in Tool-N1: reward 1 if the calls in ``<tool_call>`` equal the wanted calls and
    follow thoughts in ``<think>``, else 0.

    A record has ``tools`` (JSON list of functions), ``raw_system``, ``conversations`` (a list of ``{"from", "value"}``)
    and ``answer`` (JSON list of calls ``{"name", "arguments"}``).
    """

    is_async = True

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: The record does not have the form of :class:`ToolCallWorkflow`.
        """
        self.task = task
        self._messages = tool_messages(task.raw_task)

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the request."""
        return self._messages

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        wanted = self.raw_task.get("answer")
        for response in responses:
            response.reward = 0.0 if wanted is None else compute_toolcall_reward(response.response_text or "", wanted)
        return self._numbered_responses(responses)


def tool_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation of a record behind a system prompt with the tools. Turns of unknown roles are left out.

    Raises:
        TaskError: The record does not have the form of :class:`ToolCallWorkflow`.
    """
    tools = _json_list(record, "tools")
    described = "\n".join(json.dumps({"type": "function", "function": tool}) for tool in tools)
    messages = [
        {"role": "system", "content": str(record.get("raw_system") or "") + TOOLS_PROMPT.format(tools=described)}
    ]
    for turn in _json_list(record, "conversations"):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise TaskError(f"conversations holds {turn!r:.80}, wanted maps with from and value")
        if (role := _ROLES.get(turn["from"])) is not None:
            content = json.dumps(turn["value"]) if turn["from"] == "function_call" else turn["value"]
            messages.append({"role": role, "content": content})
    return messages


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}


def _json_list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    parsed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(parsed, list) or not parsed:
        raise TaskError(f"raw_task[{key!r}] is {value!r:.80}, wanted a list, or JSON of a list")
    return parsed


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None for other texts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def compute_toolcall_reward(solution_str: str, ground_truth: Any) -> float:
    """Return 1.0 if the last ``<tool_call>`` of a text holds the wanted calls, in any order, and thoughts in one pair
    of ``<think>`` tags precede it, else 0.0.

    Args:
        solution_str: The text of the response.
        ground_truth: JSON list of calls, or the list.
    """
    contents = list(tagged_texts(solution_str, "tool_call"))
    calls, wanted = _call_list(contents[-1].strip() if contents else None), _call_list(ground_truth)
    tags = solution_str.count("<think>"), solution_str.count("</think>")
    if calls is None or wanted is None or tags != (1, 1):
        return 0.0
    if solution_str.find("</think>") > solution_str.find("<tool_call>"):
        return 0.0
    try:
        return float(_counted(calls) == _counted(wanted))
    except RecursionError:  # arguments that are nested too deeply to be written as JSON
        return 0.0


def _call_list(value: Any) -> list[Mapping[str, Any]] | None:
    """Return the list of calls in ``value``. None: it is neither a list of maps with name and arguments nor one such
    map.
    """
    for _ in range(2):  # the value may be encoded as JSON twice
        value = _parsed(value) if isinstance(value, str) else value
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list):
        return None
    is_formed = all(isinstance(item, Mapping) and {"name", "arguments"} <= item.keys() for item in calls)
    return calls if is_formed else None


def _counted(calls: list[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter(
        (json.dumps(item["name"], sort_keys=True), json.dumps(item["arguments"], sort_keys=True)) for item in calls
    )
