"""Reward functions: pure functions that score a response, one file each."""

from trinity_mq.rewards.registry import (
    ACCURACY,
    REWARD_FUNCTIONS,
    REWARDS,
    RewardError,
    RewardFn,
    bound_reward,
    counts_tokens,
    create_reward,
    find_reward,
    invalid_parts_reason,
    judge_conversation,
    parts_of,
    takes_argument,
)
from trinity_mq.runtime.plugins import UnknownNameError

__all__ = [
    "ACCURACY",
    "REWARDS",
    "REWARD_FUNCTIONS",
    "RewardError",
    "RewardFn",
    "UnknownNameError",
    "bound_reward",
    "counts_tokens",
    "create_reward",
    "find_reward",
    "invalid_parts_reason",
    "judge_conversation",
    "parts_of",
    "takes_argument",
]
