"""An operator as users of Trinity-RFT write them; only its import lines are ours."""

from __future__ import annotations

from trinity_mq.experience import Experience
from trinity_mq.operators import EXPERIENCE_OPERATORS, ExperienceOperator


@EXPERIENCE_OPERATORS.register_module("trinity_scaling")
class ScalingOperator(ExperienceOperator):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        for exp in exps:
            exp.reward = (exp.reward or 0.0) * self.scale
        return exps, {"scaled_count": len(exps)}
