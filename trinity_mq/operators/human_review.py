"""The operator that lets people judge selected runs of a batch within a time limit, with a default verdict."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trinity_mq.algorithms.estimators.runs import finite_metrics, is_finite
from trinity_mq.config.agents import REVIEW_SECONDS
from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.messages import ReviewedCall
from trinity_mq.messages.tasks import TRUTH
from trinity_mq.operators.base import ExperienceOperatorV1, Processed
from trinity_mq.reviews.base import Answer, Decision, Question

LONGEST_TEXT = 20_000
"""Maximum characters of a prompt or a response that are shown. A longer text is shown by its beginning and end."""
MOST_CALLS = 50
"""Maximum steps of the reviewed run that are shown: the last steps."""
MOST_PARTS = 50
"""Maximum metrics of the reviewed run that are shown."""
NO_TEXT = "(no text was recorded)"


class Disagreement(BaseModel):
    """Disagreement of judges, measured by a metric of their workflow, such as the spread of their scores."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    metric: str = Field(min_length=1)
    """Key of the ``metrics`` of the run's last step, else of its ``info``."""
    above: float = Field(allow_inf_nan=False)
    """A run with a greater value is reviewed."""


class ReviewConditions(BaseModel):
    """Conditions for a review: a run is reviewed if any of them holds. The reward of a run is the reward of its last
    step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reward_above: float | None = Field(default=None, allow_inf_nan=False)
    """The reward is greater than this value."""
    reward_below: float | None = Field(default=None, allow_inf_nan=False)
    """The reward is smaller than this value, or missing."""
    fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of all runs, selected by their ids. The selection is the same when a batch is processed again."""
    seed: int = 0
    """Seed of this selection, and of the order of the matching runs that ``limit`` keeps."""
    zero_variance: bool = False
    """All runs of the task, at least two, have the same reward, or all have no reward."""
    truncated: bool = False
    """A response of the run was cut at its length limit."""
    judges_disagree: Disagreement | None = None
    """A metric of the run's last step is above a bound."""

    @model_validator(mode="after")
    def _check_conditions(self) -> ReviewConditions:
        chosen = (self.reward_above, self.reward_below, self.judges_disagree)
        if all(condition is None for condition in chosen) and not (
            self.fraction or self.zero_variance or self.truncated
        ):
            raise ValueError(
                "choose has no condition: give reward_above, reward_below, fraction, zero_variance, truncated or "
                "judges_disagree"
            )
        return self


class RewardDefault(BaseModel):
    """A reward as the default verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: float = Field(allow_inf_nan=False)


class HumanReview(ExperienceOperatorV1):
    """Lets people judge selected runs of tasks: they keep a run, drop it, or give it another reward.

    The questions of a batch are asked at once and have one deadline. The batch waits for all answers, at most
    ``seconds``. During this time the operator process does not process another batch.

    Args:
        choose: Conditions that select runs for review.
        limit: Maximum number of reviewed runs per batch. If more runs match, a hash of their ids and of ``choose.seed``
            decides.
        seconds: Maximum seconds to wait for the answers of a batch.
        default: Verdict for runs without an answer in time.

    A verdict applies to a run with all its steps. A new reward is set on each step and replaces token-level rewards.
    """

    asks_people: ClassVar[bool] = True

    def __init__(
        self,
        choose: ReviewConditions,
        limit: int = 8,
        seconds: float = REVIEW_SECONDS,
        default: Literal["keep", "drop"] | RewardDefault = "keep",
    ) -> None:
        if not 1 <= limit <= 200:
            raise ValueError(f"limit is {limit}, wanted 1 to 200 runs of a batch")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds is {seconds}, wanted more than 0")
        self.choose, self.limit, self.seconds = choose, limit, seconds
        self.default = Decision("reward", default.reward) if isinstance(default, RewardDefault) else Decision(default)

    async def process(self, exps: list[Experience]) -> Processed:
        if self.reviews is None:
            raise RuntimeError("human_review needs an operator agent with a broker: people cannot be asked here")
        runs, chosen = await asyncio.to_thread(self._select_runs, exps)
        asked = chosen[: self.limit]
        questions = await asyncio.to_thread(lambda: [_question(runs[rid], reasons) for rid, reasons in asked])
        answers = await self.reviews.ask(questions, seconds=self.seconds, default=self.default) if questions else []
        remaining, counts = _apply(exps, dict(zip((rid for rid, _ in asked), answers, strict=True)))
        return remaining, {**counts, "review/asked": len(asked), "review/not_asked": len(chosen) - len(asked)}

    def _select_runs(
        self, exps: Sequence[Experience]
    ) -> tuple[dict[str, list[Experience]], list[tuple[str, list[str]]]]:
        """Return the runs by id, and the ids of the runs to review with the reasons, in the order of asking."""
        runs: dict[str, list[Experience]] = {}
        for exp in sorted(exps, key=lambda experience: experience.eid.step):
            runs.setdefault(exp.eid.rid, []).append(exp)
        tasks: dict[str, list[float | None]] = {}
        for run in runs.values():
            tasks.setdefault(run[-1].eid.tid, []).append(run[-1].reward)
        reasons_by_run = {
            rid: reasons for rid, run in runs.items() if (reasons := self._reasons(run, tasks[run[-1].eid.tid]))
        }
        # not the hash of the fraction: its runs have the lowest values, and would all come first
        order = sorted(
            reasons_by_run, key=lambda rid: _uniform_hash(self.choose.seed, f"order {runs[rid][-1].eid.uid}")
        )
        return runs, [(rid, reasons_by_run[rid]) for rid in order]

    def _reasons(self, run: Sequence[Experience], rewards: Sequence[float | None]) -> list[str]:
        choose, last, reasons = self.choose, run[-1], []
        reward = last.reward
        if choose.reward_above is not None and reward is not None and reward > choose.reward_above:
            reasons.append(f"reward {reward:g} is above {choose.reward_above:g}")
        if choose.reward_below is not None and (reward is None or reward < choose.reward_below):
            reasons.append(
                f"reward {'is missing' if reward is None else f'{reward:g} is below {choose.reward_below:g}'}"
            )
        if choose.zero_variance and len(rewards) > 1 and len(set(rewards)) == 1:
            reasons.append(f"all {len(rewards)} runs of the task have the same reward")
        if choose.truncated and any(exp.truncate_status == RESPONSE_TRUNCATED for exp in run):
            reasons.append("a response reached its limit")
        if (judges := choose.judges_disagree) is not None:
            value = {**last.info, **last.metrics}.get(judges.metric)
            if isinstance(value, int | float) and value > judges.above:
                reasons.append(f"{judges.metric} {value:g} is above {judges.above:g}")
        if not reasons and _uniform_hash(choose.seed, last.eid.uid) < choose.fraction:
            reasons.append(f"one of {choose.fraction:.3g} of all runs")
        return reasons


def _uniform_hash(seed: int, uid: str) -> float:
    """Return a number in [0, 1) that is a hash of a seed and an id."""
    digest = hashlib.sha256(f"{seed}\n{uid}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _question(run: Sequence[Experience], reasons: Sequence[str]) -> Question:
    last = run[-1]
    calls = [
        ReviewedCall(
            prompt=_shown(exp.prompt_text),
            response=_shown(exp.response_text),
            reward=exp.reward if is_finite(exp.reward) else None,
            truncated=exp.truncate_status == RESPONSE_TRUNCATED,
        )
        for exp in run[-MOST_CALLS:]
    ]
    expected = _shown(str(last.info[TRUTH])) if TRUTH in last.info else None
    reward, parts = last.reward if is_finite(last.reward) else None, finite_metrics(last.metrics)
    return Question(last.eid.uid, calls, reward, dict(list(parts.items())[:MOST_PARTS]), reasons, expected)


def _shown(text: str | None) -> str:
    if text is None:
        return NO_TEXT
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _apply(exps: Sequence[Experience], answers: Mapping[str, Answer]) -> tuple[list[Experience], dict[str, int]]:
    """Return the remaining experiences with their new rewards, and the number of runs per verdict."""
    remaining = []
    for exp in exps:
        decision = Decision() if (answer := answers.get(exp.eid.rid)) is None else answer.decision
        if decision.verdict == "drop":
            continue
        if decision.verdict == "reward":
            exp.reward, exp.token_level_reward = decision.reward, None
        remaining.append(exp)
    verdicts = [answer.decision.verdict for answer in answers.values()]
    return remaining, {
        "review/kept": verdicts.count("keep"),
        "review/dropped": verdicts.count("drop"),
        "review/rewarded": verdicts.count("reward"),
        "review/timed_out": sum(answer.timed_out for answer in answers.values()),
    }
