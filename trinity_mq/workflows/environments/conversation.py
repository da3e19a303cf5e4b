"""The conversation of an episode: one request per step, and the experiences of the sampled answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED, RESPONSE_TRUNCATED
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.workflow import Task, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


class ConversationWorkflow(Workflow):
    """Base of asynchronous workflows that hold an :class:`EpisodeConversation`. It reads their arguments."""

    is_async = True
    arguments_kind: ClassVar[type[Arguments]]
    record_keys: ClassVar[Sequence[str]] = ()
    """Arguments that a record may set."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: Any = arguments_of(task, self.arguments_kind, record_keys=self.record_keys)


class EpisodeConversation:
    """Messages of an episode, and the answers that the model sampled for them.

    Args:
        model: The model.
        system: The system prompt.
        is_first: Whether the run has no experiences yet. A first message that is too long then fails the run, unless
            the model accepts masked experiences.
    """

    def __init__(self, model: ModelWrapper, system: str, *, is_first: bool = True) -> None:
        self._model, self._is_first = model, is_first
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        self.answers: list[Experience] = []
        """An experience for each request."""
        self.cut = False
        """Whether a limit on tokens has ended the conversation."""

    @property
    def last_round(self) -> int:
        """Number of the last request, from 0."""
        return len(self.answers) - 1

    async def ask(self, text: str, **sampling: Any) -> str | None:
        """Show ``text`` to the model; return its answer. None: the conversation is too long for the model.

        Args:
            text: Text of the user's message.
            sampling: Sampling parameters that override the parameters of the task.

        Raises:
            PromptTooLong: The first message of the run is too long, and the model does not accept masked experiences.
        """
        self.messages.append({"role": "user", "content": text})
        (response,) = await self._model.chat_async(self.messages, **{**sampling, "n": 1})
        if self._is_first and not self.answers:
            check_asked([response], self._model)
        self.answers.append(response)
        if response.truncate_status == PROMPT_TRUNCATED:
            self.cut = True
            return None
        answer = response.response_text or ""
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def experiences(self, reward: float, info: Mapping[str, Any], run: int) -> list[Experience]:
        """Return the answers as experiences. Turns are merged where a prompt continues exactly the tokens before it.

        Args:
            reward: Reward of the episode. An episode that a limit on tokens has cut has 0 instead.
            info: Facts for the last experience; the numbers among them also become its metrics.
            run: Number of the run.
        """
        experiences = merge_turns(self.answers)
        for step, experience in enumerate(experiences):
            experience.eid.run, experience.eid.step = run, step
            experience.reward = 0.0 if self.cut else reward
        last = experiences[-1]
        if self.cut and last.truncate_status is None:
            last.truncate_status = RESPONSE_TRUNCATED
        last.info.update(info)
        last.metrics = {**(last.metrics or {}), **numbers(info), "prompt_too_long": float(self.cut)}
        return experiences


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of ``info`` as metrics."""
    return {name: float(value) for name, value in info.items() if isinstance(value, int | float)}


def read_action(answer: str) -> str:
    """Return the text after the first ``<action>``, up to ``</action>``, the next ``<action>`` or the end. Return ""
    if the answer has no ``<action>``.
    """
    _, _, rest = answer.partition("<action>")
    return rest.partition("<action>")[0].partition("</action>")[0].strip()
