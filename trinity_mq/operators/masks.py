"""Operators that decide which tokens are trained on."""

from __future__ import annotations

import torch

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.operators.base import Processed, ThreadedOperator


class MaskResponseTruncated(ThreadedOperator):
    """Trains on no token of a response that was cut at its limit. Its reward still counts in its group."""

    def apply(self, exps: list[Experience]) -> Processed:
        """Return all experiences, and ``masked_truncated_count``."""
        masked = 0
        for exp in exps:
            if exp.truncate_status == RESPONSE_TRUNCATED and exp.action_mask is not None:
                # A new tensor: the old one may be a view into a received body.
                exp.action_mask = torch.zeros_like(exp.action_mask)
                masked += 1
        return exps, {"masked_truncated_count": masked}
