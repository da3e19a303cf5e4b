"""A reward of Trinity-RFT 0.6: 1 for the right last number of the response, and a small part for a short response."""

import re

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn


def last_number(text):
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None


@REWARD_FUNCTIONS.register_module("last_number_reward")
class LastNumberReward(RewardFn):
    def __init__(self, short: int = 400):
        self.short = short

    def __call__(self, response: str, truth: str = "", **kwargs) -> dict:
        right = last_number(response) is not None and last_number(response) == last_number(truth)
        return {"accuracy": float(right), "brevity": 0.1 * max(0.0, 1.0 - len(response) / self.short)}
