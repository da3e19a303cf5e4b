"""A policy loss of Trinity-RFT 0.6: the ratio is limited by a hyperbolic tangent instead of a clip."""

import torch
from trinity.algorithm import POLICY_LOSS_FN, PolicyLossFn
from trinity.algorithm.utils import masked_mean


@POLICY_LOSS_FN.register_module("soft_clip")
class SoftClipLoss(PolicyLossFn):
    def __init__(self, backend: str = "verl", width: float = 0.2):
        super().__init__(backend=backend)
        self.width = width

    def __call__(
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        **kwargs,
    ) -> tuple[torch.Tensor, dict]:
        ratio = torch.exp(logprob - old_logprob)
        limited = 1.0 + self.width * torch.tanh((ratio - 1.0) / self.width)
        loss = masked_mean(-advantages * limited, action_mask)
        return loss, {"soft_clip_loss": loss.detach().item()}

    @classmethod
    def default_args(cls) -> dict:
        return {"width": 0.2}

    @property
    def select_keys(self):
        return ["old_logprob", "action_mask", "advantages"]
