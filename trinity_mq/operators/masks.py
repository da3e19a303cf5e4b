"""Operators that decide which tokens are trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.access import E, values
from trinity_mq.experience.ragged import Ragged
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.operators.base import ColumnOperator


class MaskResponseTruncated(ColumnOperator):
    """Trains on no token of a response that was cut at its limit. Its reward still counts in its group."""

    def apply(self, exps: E) -> tuple[E, dict[str, Any]]:
        """Return all experiences, and ``masked_truncated_count``."""
        cut = [status == RESPONSE_TRUNCATED for status in values(exps, "truncate_status")]
        if isinstance(exps, ExperienceBatch):
            lengths = exps.lengths("action_mask")
            chosen = np.array(cut, dtype=np.bool_) & (lengths >= 0)
            if not chosen.any():
                return exps, {"masked_truncated_count": 0}
            untouched = np.repeat(~chosen, np.maximum(lengths, 0))
            mask = Ragged.packed(exps.dense("action_mask") & torch.from_numpy(untouched), lengths)
            return exps.replace(action_mask=mask), {"masked_truncated_count": int(chosen.sum())}
        masked = 0
        for exp in (exp for exp, wanted in zip(exps, cut, strict=True) if wanted):
            if exp.action_mask is not None:
                # A new tensor: the old one may be a view into a received body.
                exp.action_mask = torch.zeros_like(exp.action_mask)
                masked += 1
        return exps, {"masked_truncated_count": masked}
