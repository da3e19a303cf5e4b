"""Reward functions: pure functions that score a response, one file each."""

from typing import TYPE_CHECKING, Any

from trinity_mq.rewards.registry import (
    ACCURACY,
    REWARD_FUNCTIONS,
    REWARDS,
    RewardError,
    RewardFn,
    create_reward,
    find_reward,
    invalid_parts_reason,
    judge_conversation,
    parts_of,
)
from trinity_mq.runtime.plugins import UnknownNameError

if TYPE_CHECKING:
    from trinity_mq.rewards.math.trinity_answers import fix_fracs, match_answer, remove_right_units
    from trinity_mq.rewards.trinity_rewards import (
        AccuracyReward,
        CountDownRewardFn,
        FormatReward,
        MathBoxedRewardFn,
        MathDAPORewardFn,
        MathRewardFn,
        compute_score,
        compute_score_v0,
        grade_answer,
        simple_answer_parser,
        validate_think_pattern,
    )

__all__ = [
    "ACCURACY",
    "REWARDS",
    "REWARD_FUNCTIONS",
    "AccuracyReward",
    "CountDownRewardFn",
    "FormatReward",
    "MathBoxedRewardFn",
    "MathDAPORewardFn",
    "MathRewardFn",
    "RewardError",
    "RewardFn",
    "UnknownNameError",
    "compute_score",
    "compute_score_v0",
    "create_reward",
    "find_reward",
    "fix_fracs",
    "grade_answer",
    "invalid_parts_reason",
    "judge_conversation",
    "match_answer",
    "parts_of",
    "remove_right_units",
    "simple_answer_parser",
    "validate_think_pattern",
]
ANSWER_HELPERS = ("fix_fracs", "match_answer", "remove_right_units")


def __getattr__(name: str) -> Any:
    """Return a reward of Trinity-RFT; their module is imported at the first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trinity_mq.rewards import trinity_rewards
    from trinity_mq.rewards.math import trinity_answers

    return getattr(trinity_answers if name in ANSWER_HELPERS else trinity_rewards, name)
