"""ALFWorld: household tasks as text, in a process with a Python of its own.

The workflows have the prompts, actions, rewards and step limits of Trinity-RFT's workflows with the same names. The
games are in no package: ``alfworld-download`` fetches them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.models.recording.responses import is_asked
from trinity_mq.workflows.environments.children import ChildEnvironment, GameFileArguments, GameFileWorkflow
from trinity_mq.workflows.environments.conversation import EpisodeConversation, numbers
from trinity_mq.workflows.environments.prompts import ALFWORLD, RAFT_ALFWORLD, RAFT_SECOND_ATTEMPT

RAFT_STEPS = 50
"""Maximum answers of an attempt of the RAFT workflows."""
RAFT_TOKENS = 4096
"""Maximum tokens of an answer in an attempt."""
REPEATED = 3
"""Number of equal actions, one after the other, that end an attempt."""


class RaftAlfWorldArguments(GameFileArguments):
    """Arguments of the RAFT workflows of ALFWorld."""

    world = "alfworld"
    games: str = "~/.cache/alfworld"
    """Folder of the games that records may choose. The default is the folder of ``alfworld-download``."""


class AlfWorldArguments(RaftAlfWorldArguments):
    """Arguments of the workflows of ALFWorld."""

    max_env_steps: int = Field(default=30, ge=1, le=1000)
    """Maximum answers of the model in one run."""


def shown(observation: str) -> str:
    """Return an observation as the model reads it.

    The hint is part of the task; source: Trinity-RFT 0.6.0, Apache-2.0.
    """
    hint = "Please check if the action you take is valid or you have carefully followed the action format."
    return f"Observation: {observation}{hint if 'Nothing happens.' in observation else ''}"


class AlfworldWorkflow(GameFileWorkflow):
    """A game of ALFWorld. The record's prompt is the path of the game. The game gives the reward at its end. If it does
    not end within the steps, the reward is -0.1.
    """

    arguments_kind = AlfWorldArguments

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        conversation = EpisodeConversation(self.model, ALFWORLD)
        reward, done = -0.1, False
        async for state in self._states(environment, conversation, shown(environment.first["observation"]), shown):
            if state["done"]:
                reward, done = state["reward"], True
        info = {"env_rounds": conversation.last_round, "env_done": int(done)}
        return conversation.experiences(reward, info, self.run_id_base)


class StepWiseAlfworldWorkflow(AlfworldWorkflow):
    """:class:`AlfworldWorkflow` with an experience for each step, all with the reward of the game. A game that the
    model's context cuts has not ended, so its reward is -0.1, as in Trinity-RFT.

    ``info`` of each has ``env_state_hash``, the SHA-256 digest of the step's message with the observation, and
    ``step_reward``: GiGPO compares steps by these two facts.
    """

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        conversation = EpisodeConversation(self.model, ALFWORLD)
        reward, step_rewards = -0.1, list[float]()
        async for state in self._states(environment, conversation, shown(environment.first["observation"]), shown):
            step_rewards.append(state["reward"])
            if state["done"]:
                reward = state["reward"]
        texts = [message["content"] for message in conversation.messages if message["role"] == "user"]
        steps = zip(conversation.answers, texts, [*step_rewards, 0.0], strict=False)  # a cut answer has no step
        for number, (experience, text, step_reward) in enumerate(steps):
            experience.eid.run, experience.eid.step = self.run_id_base, number
            experience.info["env_state_hash"] = hashlib.sha256(text.encode()).hexdigest()
            experience.info["step_reward"] = step_reward
            experience.reward = reward
            experience.metrics = {
                **(experience.metrics or {}),
                "actual_env_steps": len(conversation.answers),
                "prompt_too_long": float(conversation.cut),
            }
        return conversation.answers


@dataclass
class Attempt:
    """One attempt at a game."""

    messages: list[dict[str, str]]
    """The conversation, without the messages about the first attempt, which only a second attempt sees."""
    answers: list[Experience]
    reward: float
    done: bool
    complete: bool
    """Whether no limit cut an answer, and each answer has the parts experience, thought and action."""

    @property
    def steps(self) -> int:
        """Number of answers."""
        return len(self.answers)


class RAFTAlfworldWorkflow(GameFileWorkflow):
    """A game of ALFWorld whose successful conversations are trained on, for ``algorithm_type: raft``.

    A run without success, a run with an answer that lacks a part, and each run of an evaluation give a masked
    experience, so that only their metrics count.
    """

    arguments_kind = RaftAlfWorldArguments

    async def _play(self, environment: ChildEnvironment) -> list[Experience]:
        attempt = await self._attempt(environment)
        facts = {"success": float(attempt.done and attempt.reward >= 1), **_facts(attempt)}
        if not self.is_eval and attempt.reward >= 1 and attempt.complete:
            return [await self._trained(attempt.messages, attempt.reward, facts)]
        if self.is_eval or attempt.reward >= 1:
            return [self._masked(attempt, facts)]
        return await self._after_failure(environment, attempt, facts)

    async def _after_failure(
        self, environment: ChildEnvironment, attempt: Attempt, facts: Mapping[str, float]
    ) -> list[Experience]:
        """Return the experiences of a run whose attempt has failed."""
        return [self._masked(attempt, facts)]

    async def _attempt(self, environment: ChildEnvironment, feedback: list[dict[str, str]] | None = None) -> Attempt:
        """Play the game once. :data:`REPEATED` equal actions end a first attempt. ``feedback``: the messages that a
        second attempt begins with.
        """
        conversation = EpisodeConversation(self.model, RAFT_ALFWORLD, is_first=feedback is None)
        clean = list(conversation.messages)
        if feedback is not None:
            conversation.messages = feedback
        observation, reward, done = environment.first["observation"], 0.0, False
        complete, actions = True, list[str]()
        for _ in range(RAFT_STEPS):
            answer = await conversation.ask(shown(observation), max_tokens=RAFT_TOKENS)
            if answer is None:
                break
            clean += [conversation.messages[-2], {"role": "assistant", "content": answer.strip()}]
            parts = read_parts(answer)
            complete = complete and all(parts)
            actions.append(parts[2])
            if feedback is None and len(actions) >= REPEATED and len(set(actions[-REPEATED:])) == 1:
                reward = 0.0
                break
            state = await environment.step(parts[2])
            observation, reward, done = state["observation"], state["reward"], state["done"]
            if done:
                break
        return Attempt(clean, conversation.answers, reward, done, complete and not conversation.cut)

    async def _trained(self, messages: list[dict[str, str]], reward: float, facts: Mapping[str, float]) -> Experience:
        """Return a conversation as an experience, trained on the assistant's tokens."""
        experience = await self.model.convert_messages_to_experience_async(messages)
        return self._finished(experience, reward, facts)

    def _masked(self, attempt: Attempt, facts: Mapping[str, float]) -> Experience:
        """Return the last answer as an experience that is not trained on, with the metrics of the run. A prompt that
        was too long has no answer, and counts only if it was the first.
        """
        experience = next((answer for answer in reversed(attempt.answers) if is_asked([answer])), attempt.answers[-1])
        experience.action_mask = torch.zeros(len(experience.tokens) - experience.prompt_length, dtype=torch.bool)
        return self._finished(experience, attempt.reward, facts)

    def _finished(self, experience: Experience, reward: float, facts: Mapping[str, float]) -> Experience:
        experience.eid.run, experience.reward = self.run_id_base, reward
        experience.info.update(facts)
        experience.metrics = {**(experience.metrics or {}), **numbers(facts)}
        return experience


class RAFTReflectAlfworldWorkflow(RAFTAlfworldWorkflow):
    """:class:`RAFTAlfworldWorkflow` with a second attempt after a failed one, which sees the first attempt and its
    result. The second attempt is trained on, without the first attempt, if its reward is higher, or if it needs fewer
    steps for a full reward. If its first prompt is too long for the model, the run gives the masked first attempt.
    """

    async def _after_failure(
        self, environment: ChildEnvironment, attempt: Attempt, facts: Mapping[str, float]
    ) -> list[Experience]:
        feedback = RAFT_SECOND_ATTEMPT.format(feedback=reward_feedback(attempt))
        messages = [*attempt.messages, {"role": "system", "content": feedback}]
        await environment.open(self._first())
        second = await self._attempt(environment, messages)
        if not is_asked(second.answers):
            return [self._masked(attempt, facts)]
        better = second.reward > attempt.reward
        faster = second.steps < attempt.steps and second.reward >= 1.0
        metrics = {
            **_facts(attempt),
            "trajectory_length": float(len(second.answers)),
            "second_reward": second.reward,
            "second_steps": float(second.steps),
            "improvement": float(better),
        }
        if second.complete and (better or faster):
            return [await self._trained(second.messages, second.reward, metrics)]
        return [self._masked(second, {**facts, **metrics})]


def read_parts(answer: str) -> tuple[str, str, str]:
    """Return experience, thought and action of an answer, which must have the three tags in this order. Return empty
    texts if it does not.
    """
    parts, rest = [], answer
    for tag in ("experience", "think", "action"):
        _, opened, rest = rest.partition(f"<{tag}>")
        text, closed, rest = rest.partition(f"</{tag}>")
        if not opened or not closed:
            return "", "", ""
        parts.append(text.strip())
    return parts[0], parts[1], parts[2]


def reward_feedback(attempt: Attempt) -> str:
    """Return the feedback on the first attempt that the second attempt sees.

    The sentences are part of the task; source: Trinity-RFT 0.6.0, Apache-2.0.
    """
    steps, reward = attempt.steps, attempt.reward
    if attempt.done and reward >= 1:
        return (
            f"In your attempt, you successfully completed the task in {steps} steps with a reward of {reward:.3f}. Try "
            "to maintain this success while being more efficient."
        )
    if attempt.done:
        return (
            f"In your attempt, you completed the task in {steps} steps but only achieved a reward of {reward:.3f}. You "
            "need to improve your performance to achieve full success."
        )
    if steps >= RAFT_STEPS:
        return (
            f"In your attempt, you reached the maximum step limit of {RAFT_STEPS} steps without completing the task "
            f"(reward: {reward:.3f}). You need to be more efficient and focused to complete the task within the step "
            "limit."
        )
    return (
        f"In your attempt, you stopped after {steps} steps with a reward of {reward:.3f} without completing the task. "
        "You need to improve your strategy and persistence to achieve success."
    )


def _facts(attempt: Attempt) -> dict[str, float]:
    return {"reward": attempt.reward, "steps": float(attempt.steps)}
