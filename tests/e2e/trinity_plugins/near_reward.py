"""A reward as users of Trinity-RFT write them; only its import line is ours."""

from __future__ import annotations

from typing import Any

from trinity_mq.rewards import REWARD_FUNCTIONS, RewardFn


@REWARD_FUNCTIONS.register_module("trinity_near_reward")
class NearReward(RewardFn):
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, response: str, truth: str | None = None, **kwargs: Any) -> dict[str, float]:
        return {"starts_right": self.weight * float(bool(truth) and response[:1] == str(truth)[:1])}
