"""Operators that decide which tokens are trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Ragged
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.operators.base import ColumnOperator


class MaskResponseTruncated(ColumnOperator):
    """Masks all tokens of a response that was cut at its limit. Its reward still counts in its group. An experience
    without an action mask is unchanged.
    """

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return all experiences, and the number of masked responses as ``masked_truncated_count``."""
        lengths = batch.lengths("action_mask")
        cut = np.array([status == RESPONSE_TRUNCATED for status in batch.values("truncate_status")], dtype=np.bool_)
        cut &= lengths >= 0
        if not cut.any():
            return batch, {"masked_truncated_count": 0}
        untouched = torch.from_numpy(np.repeat(~cut, np.maximum(lengths, 0)))
        mask = Ragged.packed(batch.dense("action_mask") & untouched, lengths)
        return batch.replace(action_mask=mask), {"masked_truncated_count": int(cut.sum())}
