"""The decode loop: a batch of prompts to sampled tokens, prompts read once, finished rows let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_mq.models.engines.generation.request import FinishReason, GenerationListener, GenerationRequest, Token
from trinity_mq.models.engines.torch.sampling import Uniforms, choose


class RowListener:
    """A :class:`GenerationListener` in terms of the decode loop's rows."""

    def __init__(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener, device: torch.device
    ) -> None:
        self._listener = listener
        self._places = [(number, choice) for number, request in enumerate(requests) for choice in range(request.n)]
        heard = [listener.listens(number) for number, _ in self._places]
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
            self._listener.sampled(out)

    def between(self, step: int) -> None:
        """See :meth:`GenerationListener.between`."""
        self._listener.between(step)

    def left(self) -> Tensor | None:
        """Return which rows of the whole batch nobody waits for any more, bool ``[rows]``; None: as before."""
        gone = [number for number in self._waiting if self._listener.left(number)]
        if not gone:
            return None
        self._waiting = [number for number in self._waiting if number not in gone]
        self._left |= torch.isin(self._numbers, torch.tensor(gone)).to(self._left.device)
        return self._left


COMPACT_BELOW = 0.5
"""Share of unfinished rows at which the finished ones are cut out: cutting copies the cache, keeping them computes for
nothing."""


class GenerationCancelled(Exception):
    """The engine is going away; what was being generated is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens of one row, end of sequence included."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


class _Recorder:
    """Sampled tokens of all rows, one column per step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def add(self, active: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Keep one step of the rows ``active``."""
        column = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        values = torch.zeros(self._rows, dtype=torch.float32, device=self._device)
        self._tokens.append(column.index_copy_(0, active, tokens))
        self._logprobs.append(values.index_copy_(0, active, logprobs))

    def finished(self) -> list[Sampled]:
        tokens, logprobs = torch.stack(self._tokens, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        ends = zip(self.lengths.tolist(), self.stopped.tolist(), strict=True)
        return [
            Sampled(row[:length], values[:length], "stop" if stopped else "length")
            for row, values, (length, stopped) in zip(tokens, logprobs, ends, strict=True)
        ]


@dataclass(slots=True)
class _Rows:
    """The rows still being computed. Everything has one entry a row, in the cache's order."""

    ids: Tensor
    """Position in the whole batch."""
    mask: Tensor
    """``[rows, cached tokens]``: 0 on the padding left of a prompt."""
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    limits: Tensor
    done: Tensor

    def keep(self, chosen: Tensor) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[chosen])


StopWatch = Callable[[Tensor, Tensor], Tensor]
"""Given the positions of rows and the tokens they just sampled, says (bool per row) which completed a stop string."""


@torch.inference_mode()
def decode(
    model: Any,
    requests: Sequence[GenerationRequest],
    *,
    pad_id: int,
    device: torch.device,
    stop_watch: StopWatch | None = None,
    row_listener: RowListener | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Sampled]:
    """Return what each row sampled; request i has ``n`` rows, requests in order.

    Rows that ``row_listener`` says nobody waits for end at once, with nothing. It may also have the model's weights
    changed between two steps: what was read under the old ones stays in the cache.

    Raises:
        GenerationCancelled: ``cancelled()`` became true between two steps.
    """
    from transformers import DynamicCache

    counts = [request.n for request in requests]
    cache = DynamicCache(config=model.config)
    rows, logits = _prefill(model, cache, requests, pad_id, device)
    stop_table, stop_sets = _stop_table(requests, logits.shape[-1], device)
    uniforms = Uniforms([request.seed for request in requests], counts, device)
    recorder = _Recorder(sum(counts), device)
    step = 0
    while True:
        if cancelled():
            raise GenerationCancelled
        tokens, logprobs = choose(logits, rows.temperature, rows.top_p, uniforms.step(step)[rows.ids])
        recorder.add(rows.ids, tokens, logprobs)
        step += 1
        stopped = stop_table[stop_sets[rows.ids], tokens]
        if stop_watch is not None:
            stopped = stopped | stop_watch(rows.ids, tokens)
        ended = (stopped | (rows.limits <= step)) & ~rows.done
        recorder.lengths[rows.ids[ended]] = step
        recorder.stopped[rows.ids[ended]] = stopped[ended]
        if row_listener is not None:
            if row_listener.listening:
                live = ~rows.done
                row_listener.step(*(values[live] for values in (rows.ids, tokens, logprobs, ended, stopped)))
            if (left := row_listener.left()) is not None:
                rows.done |= left[rows.ids]
        rows.done |= ended
        unfinished = int((~rows.done).sum())
        if unfinished == 0:
            return recorder.finished()
        if unfinished <= COMPACT_BELOW * len(rows.done):
            chosen = (~rows.done).nonzero()[:, 0]
            cache.batch_select_indices(chosen)
            rows.keep(chosen)
            tokens = tokens[chosen]
        if row_listener is not None:
            row_listener.between(step)
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(tokens), 1)], dim=1)
        logits = _forward(model, cache, tokens[:, None], rows.mask, rows.positions[:, None])
        rows.positions = rows.positions + 1


def _prefill(
    model: Any, cache: Any, requests: Sequence[GenerationRequest], pad_id: int, device: torch.device
) -> tuple[_Rows, Tensor]:
    """Read each prompt once, then give each of its completions a copy of what was read."""
    lengths = [len(request.prompt) for request in requests]
    width = max(lengths)
    padded = [[pad_id] * (width - len(request.prompt)) + list(request.prompt) for request in requests]
    ids = torch.tensor(padded, dtype=torch.int64, device=device)
    sizes = torch.tensor(lengths, device=device)
    mask = (torch.arange(width, device=device)[None, :] >= (width - sizes)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = _forward(model, cache, ids, mask, positions)
    counts = torch.tensor([request.n for request in requests], device=device)
    source = torch.arange(len(requests), device=device).repeat_interleave(counts)
    if len(source) != len(requests):
        cache.batch_select_indices(source)
        logits, mask = logits[source], mask[source]
    rows = _Rows(
        ids=torch.arange(len(source), device=device),
        mask=mask,
        positions=sizes[source],
        temperature=torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device)[
            source
        ],
        top_p=torch.tensor([request.top_p for request in requests], dtype=torch.float32, device=device)[source],
        limits=torch.tensor([request.max_tokens for request in requests], device=device)[source],
        done=torch.zeros(len(source), dtype=torch.bool, device=device),
    )
    return rows, logits


def _forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Return the logits after the last token of each row, ``[rows, vocabulary]``."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _stop_table(requests: Sequence[GenerationRequest], vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which tokens stop, bool ``[sets, vocabulary]``, and the set of each row."""
    distinct = {
        stop_ids: number for number, stop_ids in enumerate(dict.fromkeys(request.stop_ids for request in requests))
    }
    table = torch.zeros(len(distinct), vocabulary, dtype=torch.bool)
    for stop_ids, number in distinct.items():
        table[number, [token for token in stop_ids if token < vocabulary]] = True
    sets = torch.tensor([distinct[request.stop_ids] for request in requests for _ in range(request.n)])
    return table.to(device), sets.to(device)
