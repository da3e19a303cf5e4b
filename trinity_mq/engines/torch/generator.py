"""A causal language model that samples and scores. It is used only in the engine's worker thread.

The decode loop (:func:`decode`) samples tokens for a batch of prompts, reads each prompt once, and drops finished rows.
Completions of one request that have sampled the same tokens so far share one sequence in the cache, so that the model
computes them once. A group begins as one sequence, which is divided where its samples differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_mq.config import ModelConfig
from trinity_mq.engines.api_errors import bad_request
from trinity_mq.engines.card import SleepLevel
from trinity_mq.engines.generation.request import (
    Alternatives,
    Completion,
    FinishReason,
    GenerationListener,
    GenerationRequest,
    RoutedExperts,
    ScoreRequest,
    Token,
)
from trinity_mq.engines.generation.stopping import StopStrings, cut, stop_in, without_stop_token
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.parking import ParkedTensors
from trinity_mq.engines.torch.sampling import LogitRules, Uniforms, choose, likeliest, tempered_logprobs
from trinity_mq.engines.torch.weights import WeightsError, check, copy_into, named_weights
from trinity_mq.families.forms import AnswerForm
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import model_without_weights
from trinity_mq.models.routers import Routers
from trinity_mq.runtime.gpu_memory import release_cached_memory

SCORE_TOKENS = 1 << 14
"""Maximum padded tokens scored in one forward pass."""

COMPACT_BELOW = 0.5
"""Share of unfinished sequences at or below which finished sequences are cut out. Cutting copies the cache; keeping
them wastes computation.
"""
StopWatch = Callable[[Tensor, Tensor], Tensor]
"""Takes the positions of rows and the tokens they just sampled. Returns a bool per row: True where a stop string is
complete.
"""


class TextGenerator:
    """A model with its tokenizer: generates batches of requests, each batch in one call, scores tokens, and takes new
    weights.
    """

    def __init__(self, model: Any, codec: TextCodec, *, max_model_len: int, routers: Routers | None = None) -> None:
        self.model = model.eval()
        self.codec = codec
        self._routers = routers
        """Set if completions carry the experts of their tokens."""
        self.device: torch.device = next(model.parameters()).device
        self.max_model_len = max_model_len
        """Maximum tokens of prompt and response together."""
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        """Size of the vocabulary; token ids are smaller."""
        self._cancelled = threading.Event()
        self._parked, self._discarded = ParkedTensors(), ParkedTensors()

    @classmethod
    def build(cls, config: ModelConfig, folder: Path, *, num_threads: int) -> TextGenerator:
        """Return a generator whose weights have arbitrary values; the real weights are applied later.

        Raises:
            ModelError: The folder does not describe a causal language model that can be built.
        """
        torch.set_num_threads(num_threads)
        codec = TextCodec.of_model(folder, config)
        in_folder = config.model_copy(update={"tiny": None, "model_path": str(folder)})
        with torch.device(choose_device(config.device)):
            model = model_without_weights(in_folder, dtype=getattr(torch, config.dtype))
        text_config = model.config.get_text_config()
        longest = getattr(text_config, "max_position_embeddings", None) or config.max_model_len
        routers = Routers(model) if config.router_replay else None
        return cls(model, codec, max_model_len=min(config.max_model_len, longest), routers=routers)

    def generate(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order. ``listener`` receives each token and reports requests
        without a waiting caller.

        Raises:
            GenerationCancelled: :meth:`cancel` was called.
        """
        stops = [request.stop for request in requests for _ in range(request.n)]
        sampled = decode(
            self.model,
            requests,
            pad_id=self.codec.pad_id,
            device=self.device,
            stop_watch=StopStrings(stops, self.codec.decode) if any(stops) else None,
            row_listener=None if listener is None else RowListener(requests, listener, self.device),
            cancelled=self._cancelled.is_set,
            routers=self._routers,
        )
        release_cached_memory()
        stop_ids = [request.stop_ids for request in requests for _ in range(request.n)]
        texts = self.codec.decode(
            [without_stop_token(row.token_ids, ends) for row, ends in zip(sampled, stop_ids, strict=True)]
        )
        completions = iter(
            [
                Completion(
                    row.token_ids,
                    row.logprobs,
                    cut(text, stop),
                    row.finish_reason,
                    stopped_by=stop_in(text, stop),
                    routed_experts=row.routed_experts,
                    top_logprobs=row.top_logprobs,
                )
                for row, text, stop in zip(sampled, texts, stops, strict=True)
            ]
        )
        return [[next(completions) for _ in range(request.n)] for request in requests]

    def grammar_of(self, form: AnswerForm, prompt_end: str) -> str:
        """Refuse the form: this engine has no constrained sampling.

        Raises:
            ApiError: 400, always.
        """
        raise bad_request(
            f"{form.option} asks for constrained sampling, which the engine transformers does not have; set "
            f"explorer.rollout_model.engine to vllm, or leave {form.option} out and ask for the form in the prompt",
            form.option,
            "unsupported_option",
        )

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[list[float]]:
        """Return for each request the logprob of every token after the first, float32, by a plain forward pass."""
        results: list[list[float]] = []
        for batch in _batches(requests):
            width = max(len(request.token_ids) for request in batch)
            padded = [
                [*request.token_ids, *[self.codec.pad_id] * (width - len(request.token_ids))] for request in batch
            ]
            ids = torch.tensor(padded, dtype=torch.int64, device=self.device)
            sizes = torch.tensor([len(request.token_ids) for request in batch], device=self.device)
            mask = (torch.arange(width, device=self.device)[None, :] < sizes[:, None]).long()
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, request in enumerate(batch):
                length = len(request.token_ids)
                temperatures = torch.full((length - 1,), request.temperature, dtype=torch.float32, device=self.device)
                logprobs = tempered_logprobs(logits[row, : length - 1], temperatures)
                results.append(logprobs.gather(-1, ids[row, 1:length, None])[:, 0].tolist())
        return results

    def cancel(self) -> None:
        """Make a running :meth:`generate`, and all later calls, raise within a decode step. Any thread may call it."""
        self._cancelled.set()

    def check(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that :meth:`apply` will copy.

        Raises:
            WeightsError: The tensors do not fit; nothing was touched.
        """
        return check(self.model, tensors)

    def apply(self, checked: Mapping[str, Tensor]) -> None:
        """Copy the tensors that :meth:`check` returned into the model."""
        copy_into(self.model, checked)

    def sleep(self, level: SleepLevel) -> None:
        """Free the memory of parameters and buffers. Level 2 discards the values of the parameters; all other values
        are kept in host memory. A cache exists only during a batch step.
        """
        buffers = list(self.model.buffers())
        if level == 2:
            self._discarded.park(self.model.parameters(), keep=False)
            self._parked.park(buffers)
        else:
            self._parked.park([*self.model.parameters(), *buffers])

    def wake_weights(self) -> None:
        """Give parameters and buffers their memory again. Discarded parameters have arbitrary values until
        :meth:`apply`.
        """
        self._discarded.unpark()
        self._parked.unpark()

    def wake_cache(self) -> None:
        """Do nothing: each batch step makes its own cache."""

    def weight(self, name: str) -> bytes:
        """Return one weight as safetensors bytes.

        Raises:
            WeightsError: No weight has this name.
        """
        from safetensors.torch import save

        weights = named_weights(self.model)
        if name not in weights:
            raise WeightsError(
                f"the model has no weight {name!r}; the first of {len(weights)} is {next(iter(weights))!r}"
            )
        data: bytes = save({name: weights[name].detach().cpu().contiguous()})
        return data


def choose_device(device: str) -> str:
    """Return ``cuda`` or ``cpu``; ``auto`` chooses a GPU if one exists.

    Raises:
        ModelError: ``cuda`` is set, but torch sees no GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "model.device is cuda, but torch sees no GPU; set model.device=auto or cpu, or install torch for CUDA"
        )
    return device


def _batches(requests: Sequence[ScoreRequest]) -> list[list[ScoreRequest]]:
    """Split ``requests``, in order, into parts of at most SCORE_TOKENS padded tokens (or of a single request)."""
    parts: list[list[ScoreRequest]] = []
    width = 0
    for request in requests:
        width = max(width, len(request.token_ids))
        if parts and width * (len(parts[-1]) + 1) <= SCORE_TOKENS:
            parts[-1].append(request)
        else:
            parts.append([request])
            width = len(request.token_ids)
    return parts


def auxiliary_generator(name: str, config: ModelConfig, folder: Path, *, num_threads: int) -> TextGenerator:
    """Return a generator of the auxiliary model ``name`` with the weights of its folder.

    Raises:
        ModelError: The model, or its weights, are not available.
    """
    from transformers import AutoModelForCausalLM

    generator = TextGenerator.build(config.model_copy(update={"router_replay": False}), folder, num_threads=num_threads)
    try:
        saved = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        generator.apply(generator.check(named_weights(saved)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"auxiliary model {name!r}: the weights in {folder} cannot be read: {' '.join(str(error).split())}"
        ) from error
    return generator


async def refuse_transfer(spec: dict[str, Any]) -> Mapping[str, Any]:
    """Refuse a transfer: an auxiliary model is never trained."""
    raise WeightsError("an auxiliary engine takes no weights: it serves the weights of its folder")


class RowListener:
    """Passes tokens from the rows of the decode loop to a :class:`GenerationListener`, which counts by request."""

    def __init__(
        self, requests: Sequence[GenerationRequest], listener: GenerationListener, device: torch.device
    ) -> None:
        self._listener = listener
        self._places = [(number, choice) for number, request in enumerate(requests) for choice in range(request.n)]
        listens = [listener.listens(number) for number, _ in self._places]
        self.listening = any(listens)
        """Whether any request is streamed, so that :meth:`step` has tokens to report."""
        self._listens = torch.tensor(listens, device=device)
        self._numbers = torch.tensor([number for number, _ in self._places])
        self._waiting = list(range(len(requests)))
        self._abandoned = torch.zeros(len(self._places), dtype=torch.bool, device=device)

    def step(
        self,
        rows: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        ended: Tensor,
        stopped: Tensor,
        alternatives: Mapping[int, Alternatives],
    ) -> None:
        """Report the tokens that the unfinished ``rows`` just sampled; the tensors have one entry per row.
        ``alternatives``: likeliest tokens of the rows that want them.
        """
        chosen = self._listens[rows]
        columns = [values[chosen].tolist() for values in (rows, tokens, logprobs, ended, stopped)]
        out = [
            Token(
                self._places[row][0],
                self._places[row][1],
                token,
                logprob,
                ("stop" if stop else "length") if end else None,
                top_logprobs=alternatives.get(row, ()),
            )
            for row, token, logprob, end, stop in zip(*columns, strict=True)
        ]
        if out:
            self._listener.sampled(out)

    def between(self, step: int) -> None:
        """Report the point before decode step ``step`` to the listener, which may block there or raise."""
        self._listener.between(step)

    def left(self) -> Tensor | None:
        """Return the rows of the whole batch without a waiting caller, bool ``[rows]``; None if they are unchanged."""
        abandoned = [number for number in self._waiting if self._listener.left(number)]
        if not abandoned:
            return None
        self._waiting = [number for number in self._waiting if number not in abandoned]
        self._abandoned |= torch.isin(self._numbers, torch.tensor(abandoned)).to(self._abandoned.device)
        return self._abandoned


class GenerationCancelled(Exception):
    """The engine is shutting down; the running generation is not needed any more."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Sampled tokens of one row, including the end-of-sequence token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    top_logprobs: Sequence[Alternatives] = ()


class _Alternatives:
    """Records the likeliest tokens of the rows that want them. ``counts``: number of tokens per place by row of the
    batch, or 0.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._counts, self._has_any = counts, any(counts)
        self._wanted = torch.tensor([count > 0 for count in counts], device=device)
        self.of_row: list[list[Alternatives]] = [[] for _ in counts]

    def add(self, rows: _Rows, logits: Tensor, temperature: Tensor) -> dict[int, Alternatives]:
        """Record one decode step of the unfinished rows, and return its likeliest tokens by row; ``logits``:
        ``[sequences, vocabulary]``.
        """
        places = self._wanted[rows.ids].nonzero()[:, 0] if self._has_any else self._wanted[:0]
        if not len(places):
            return {}
        sequences, numbers = rows.sequence[places], rows.ids[places].tolist()
        largest = max(self._counts[number] for number in numbers)
        tokens, values = likeliest(logits[sequences], temperature[sequences], largest)
        step: dict[int, Alternatives] = {}
        for number, ids, logprobs in zip(numbers, tokens.tolist(), values.tolist(), strict=True):
            step[number] = list(zip(ids, logprobs, strict=True))[: self._counts[number]]
            self.of_row[number].append(step[number])
        return step


class _Recorder:
    """Records the sampled tokens of all rows, one column per decode step."""

    def __init__(self, counts: Sequence[int], device: torch.device, experts: _ExpertRecorder | None = None) -> None:
        """Create the recorder. ``counts``: number of likeliest tokens to record, by row."""
        rows = len(counts)
        self.experts = experts
        self.alternatives = _Alternatives(counts, device)
        self._rows, self._device = rows, device
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def add(self, active: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Record one decode step of the rows ``active``."""
        column = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        values = torch.zeros(self._rows, dtype=torch.float32, device=self._device)
        self._tokens.append(column.index_copy_(0, active, tokens))
        self._logprobs.append(values.index_copy_(0, active, logprobs))

    def finished(self) -> list[SampledRow]:
        tokens, logprobs = torch.stack(self._tokens, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        lengths = self.lengths.tolist()
        ends = zip(lengths, self.stopped.tolist(), strict=True)
        experts = [None] * self._rows if self.experts is None else self.experts.of(lengths)
        tops = self.alternatives.of_row
        return [
            SampledRow(row[:length], values[:length], "stop" if stopped else "length", routed_experts, top)
            for row, values, (length, stopped), routed_experts, top in zip(
                tokens, logprobs, ends, experts, tops, strict=True
            )
        ]


class _ExpertRecorder:
    """Records the experts that the model chose for prompts and sampled tokens.

    Args:
        routers: The model's routers, which have just read the prompts.
        requests: The requests of the batch.
    """

    def __init__(self, routers: Routers, requests: Sequence[GenerationRequest]) -> None:
        chosen = routers.chosen(len(requests)).cpu()  # prompts are padded on the left
        prompts = [row[len(row) - len(request.prompt) :] for row, request in zip(chosen, requests, strict=True)]
        self._routers = routers
        self._prompts = [prompt for prompt, request in zip(prompts, requests, strict=True) for _ in range(request.n)]
        self._steps: list[Tensor] = []

    def add(self, rows: _Rows, sequences: int) -> None:
        """Record the experts of the tokens that the model has just read, one in each of the cached ``sequences``."""
        chosen = self._routers.chosen(sequences)[:, 0][rows.sequence]
        column = chosen.new_zeros(len(self._prompts), *chosen.shape[1:])
        self._steps.append(column.index_copy_(0, rows.ids, chosen).cpu())

    def of(self, lengths: Sequence[int]) -> list[RoutedExperts]:
        """Return the experts of each row, which has ``lengths[row]`` sampled tokens, without the last token, which the
        model has not read.
        """
        steps = torch.stack(self._steps, 1) if self._steps else None
        rows = [
            prompt if steps is None else torch.cat([prompt, steps[row, : max(length - 1, 0)]])
            for row, (prompt, length) in enumerate(zip(self._prompts, lengths, strict=True))
        ]
        return [RoutedExperts((row.shape[0], row.shape[1], row.shape[2]), row.numpy().tobytes()) for row in rows]


class _Entries:
    """Tensors with one entry each per row or sequence."""

    __slots__: tuple[str, ...] = ()

    def keep(self, chosen: Tensor) -> None:
        """Keep only the chosen entries, in this order."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[chosen])


@dataclass(slots=True)
class _Rows(_Entries):
    """The unfinished completions, one entry per completion."""

    ids: Tensor
    """Position in the whole batch."""
    limits: Tensor
    sequence: Tensor
    """Position in the cache of the tokens sampled so far; several completions may share it."""


@dataclass(slots=True)
class _Sequences(_Entries):
    """The sequences in the cache, one entry per sequence, in cache order. Some may belong to finished completions."""

    mask: Tensor
    """``[sequences, cached tokens]``: 0 on the padding left of a prompt."""
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    request: Tensor
    """Number of the request."""


class _Cached:
    """The cache of the model, and the mapping from completions to sequences in it."""

    def __init__(self, cache: Any, rows: _Rows, sequences: _Sequences) -> None:
        self._cache, self._rows, self._sequences = cache, rows, sequences
        self._divided = False
        """True once no two completions share a sequence. From then on they never do."""

    def divide(self) -> None:
        """Give each completion its own sequence."""
        if len(self._rows.ids) != len(self._sequences.positions):
            self._select(self._rows.sequence)
        self._rows.sequence = torch.arange(len(self._rows.ids), device=self._rows.ids.device)
        self._divided = True

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next token of each completion and its logprob; ``logits``: ``[sequences, vocabulary]``."""
        source, sequences = self._rows.sequence, self._sequences
        if not self._divided:
            return choose(logits, sequences.temperature, sequences.top_p, uniforms, source)
        if len(source) < len(logits):
            return choose(logits[source], sequences.temperature[source], sequences.top_p[source], uniforms)
        return choose(logits, sequences.temperature, sequences.top_p, uniforms)

    def append(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """Divide sequences whose completions have just sampled different ``tokens``, and cut finished sequences out if
        that saves work. Return the next input token of each sequence.
        """
        rows, present = self._rows, len(self._sequences.positions)
        parents, position = rows.sequence, torch.arange(len(tokens), device=tokens.device)
        next_tokens, grows = tokens, False
        if not self._divided:
            keys, positions = torch.unique(rows.sequence * vocabulary + tokens, return_inverse=True)
            if len(keys) == len(tokens):
                # from now on the sequences are in the order of the completions
                self._divided, grows = True, True
            else:
                parents, next_tokens, position = keys // vocabulary, keys % vocabulary, positions
                grows = len(keys) > len(torch.unique(rows.sequence))
        if grows or len(parents) <= COMPACT_BELOW * present:
            self._select(parents)
            rows.sequence = position
            return next_tokens
        # finished sequences continue with an arbitrary token
        return tokens.new_zeros(present).index_copy_(0, parents, next_tokens)

    def _select(self, chosen: Tensor) -> None:
        self._cache.batch_select_indices(chosen)
        self._sequences.keep(chosen)


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
    share: bool = True,
    routers: Routers | None = None,
) -> list[SampledRow]:
    """Return the sampled tokens of each row; request i has ``n`` rows, requests in order.

    Rows that ``row_listener`` reports as left by their callers end at once, with an empty result. The listener may also
    let the model's weights change between two steps; cache entries computed under the old weights stay. ``share``: let
    the rows of a request share one sequence as long as they have sampled the same tokens. ``routers``: routers of the
    model, if the rows carry the experts of their tokens.

    Raises:
        GenerationCancelled: ``cancelled()`` became true between two steps.
    """
    from transformers import DynamicCache

    counts = [request.n for request in requests]
    cache = DynamicCache(config=model.config)
    rows, sequences, logits = _prefill(model, cache, requests, pad_id, device)
    experts = None if routers is None else _ExpertRecorder(routers, requests)
    cached, vocabulary = _Cached(cache, rows, sequences), logits.shape[-1]
    if not share or len(rows.ids) == len(requests):
        logits = logits[rows.sequence]
        cached.divide()
    stop_table, stop_sets = _stop_table(requests, vocabulary, device)
    uniforms = Uniforms([request.seed for request in requests], counts, device)
    rules = LogitRules(
        [request.logit_bias for request in requests],
        [request.min_tokens for request in requests],
        [request.stop_ids for request in requests],
        vocabulary,
        device,
    )
    recorder = _Recorder([request.top_logprobs for request in requests for _ in range(request.n)], device, experts)
    step = 0
    while True:
        if cancelled():
            raise GenerationCancelled
        logits = rules.apply(logits, sequences.request, step)
        tokens, logprobs = cached.choose(logits, uniforms.step(step)[rows.ids])
        recorder.add(rows.ids, tokens, logprobs)
        alternatives = recorder.alternatives.add(rows, logits, sequences.temperature)
        step += 1
        stopped = stop_table[stop_sets[rows.ids], tokens]
        if stop_watch is not None:
            stopped = stopped | stop_watch(rows.ids, tokens)
        done = stopped | (rows.limits <= step)
        recorder.lengths[rows.ids[done]] = step
        recorder.stopped[rows.ids[done]] = stopped[done]
        if row_listener is not None:
            if row_listener.listening:
                row_listener.step(rows.ids, tokens, logprobs, done, stopped, alternatives)
            if (abandoned := row_listener.left()) is not None:
                done = done | abandoned[rows.ids]
        unfinished = (~done).nonzero()[:, 0]
        if not len(unfinished):
            return recorder.finished()
        if len(unfinished) < len(done):
            rows.keep(unfinished)
            tokens = tokens[unfinished]
        next_tokens = cached.append(tokens, vocabulary)
        if row_listener is not None:
            row_listener.between(step)
        sequences.mask = torch.cat([sequences.mask, sequences.mask.new_ones(len(next_tokens), 1)], dim=1)
        logits = _forward(model, cache, next_tokens[:, None], sequences.mask, sequences.positions[:, None])
        if experts is not None:
            experts.add(rows, len(next_tokens))
        sequences.positions = sequences.positions + 1


def _prefill(
    model: Any, cache: Any, requests: Sequence[GenerationRequest], pad_id: int, device: torch.device
) -> tuple[_Rows, _Sequences, Tensor]:
    """Read each prompt once; its completions share its sequence in the cache. Logits: ``[requests, vocabulary]``."""
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
    sequences = _Sequences(
        mask=mask,
        positions=sizes,
        temperature=torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device),
        top_p=torch.tensor([request.top_p for request in requests], dtype=torch.float32, device=device),
        request=torch.arange(len(requests), device=device),
    )
    rows = _Rows(
        ids=torch.arange(len(source), device=device),
        limits=torch.tensor([request.max_tokens for request in requests], device=device)[source],
        sequence=source,
    )
    return rows, sequences, logits


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
    """Return the stop tokens as bool ``[sets, vocabulary]``, and the set index of each row."""
    distinct = {
        stop_ids: number for number, stop_ids in enumerate(dict.fromkeys(request.stop_ids for request in requests))
    }
    table = torch.zeros(len(distinct), vocabulary, dtype=torch.bool)
    for stop_ids, number in distinct.items():
        table[number, [token for token in stop_ids if token < vocabulary]] = True
    sets = torch.tensor([distinct[request.stop_ids] for request in requests for _ in range(request.n)])
    return table.to(device), sets.to(device)
