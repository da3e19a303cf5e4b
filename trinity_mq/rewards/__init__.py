"""Reward functions, which score a response. The built-in functions are pure."""

from trinity_mq.rewards.math.trinity_answers import fix_fracs, match_answer, remove_right_units
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
from trinity_mq.runtime.plugins import UnknownNameError

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
