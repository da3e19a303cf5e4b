"""Between the decode loop and those who wait for it: tokens go out as they are sampled, unwanted rows are let go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trinity_mq.models.engines.generation.request import GenerationRequest, Token, Watch


class RowListener:
    """A :class:`Watch` in terms of the decode loop's rows."""

    def __init__(self, requests: Sequence[GenerationRequest], watch: Watch, device: torch.device) -> None:
        self._watch = watch
        self._places = [(number, choice) for number, request in enumerate(requests) for choice in range(request.n)]
        heard = [watch.listens(number) for number, _ in self._places]
        self.listening = any(heard)
        """Whether :meth:`step` has anybody to tell."""
        self._heard = torch.tensor(heard, device=device)
        self._numbers = torch.tensor([number for number, _ in self._places])
        self._waiting = list(range(len(requests)))
        self._left = torch.zeros(len(self._places), dtype=torch.bool, device=device)

    def step(self, rows: Tensor, tokens: Tensor, logprobs: Tensor, ended: Tensor, stopped: Tensor) -> None:
        """Take in what the unfinished ``rows`` just sampled; all arguments have one entry a row."""
        chosen = self._heard[rows]
        columns = [values[chosen].tolist() for values in (rows, tokens, logprobs, ended, stopped)]
        out = [
            Token(
                self._places[row][0],
                self._places[row][1],
                token,
                logprob,
                ("stop" if stop else "length") if end else None,
            )
            for row, token, logprob, end, stop in zip(*columns, strict=True)
        ]
        if out:
            self._watch.sampled(out)

    def between(self, step: int) -> None:
        """See :meth:`Watch.between`."""
        self._watch.between(step)

    def left(self) -> Tensor | None:
        """Return which rows of the whole batch nobody waits for any more, bool ``[rows]``; None: as before."""
        gone = [number for number in self._waiting if self._watch.left(number)]
        if not gone:
            return None
        self._waiting = [number for number in self._waiting if number not in gone]
        self._left |= torch.isin(self._numbers, torch.tensor(gone)).to(self._left.device)
        return self._left
