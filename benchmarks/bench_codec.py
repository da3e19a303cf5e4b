"""The experience body against the reference's layout and against plain copying: time and size.

    python benchmarks/bench_codec.py [--quick] [--check] [--json FILE]

Baseline 1 is the layout of Trinity-RFT 0.6.0, written here from its description: a pickled map with the metadata of all
items, then a safetensors blob with one entry per experience and field; reading builds one object per experience.
Baseline 2 is ``bytearray(body)``. All sides get the same values and take turns in one process, forwards and backwards
(A B B A), each right after a turn of its own that is not counted; the garbage collector rests while the clock runs, and
freeing a result is not counted for any side.

What is encoded: groups of 8 runs that share a prompt (1/8 of the tokens), responses whose lengths vary by 25 %. Token
ids follow Zipf's law over a vocabulary of 150 000, half of them in phrases that come again, so that zstd finds about
what it finds in text; log-probabilities are mostly near 0, with random mantissas. Versions and temperatures are only in
our body, since the reference has no field for them. A batch opens ids, texts and documents when asked for; "all opened"
is with that work done, as the reference does it at once. ``--check`` exits with 1 if a target of the format is missed.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import secrets
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from trinity_mq.experience import EID, Experience, ExperienceBatch, decode, encode

SHAPES = ((8, 64), (8, 512), (64, 1024), (256, 256), (256, 2048))
"""Experiences and mean tokens of each."""
QUICK_SHAPES = ((8, 64), (16, 128))
SECONDS_PER_SHAPE = 6.0

ENCODE_TARGETS = {(256, 256): 5.0, (256, 2048): 3.0}
LIST_TARGETS = {(256, 256): 3.0, (256, 2048): 2.0}
BATCH_TARGETS = {(256, 256): 10.0, (256, 2048): 10.0}
COPY_SHAPE = (256, 2048)
COPIES, COPY_EXTRA_MS = 1.5, 2.0
"""A batch of COPY_SHAPE is decoded, checksum included, within this many copies of the body and milliseconds."""
ZSTD_TARGET = 0.8
"""Largest size with zstd, as a share of the reference's size."""

RUNS_PER_TASK = 8
VOCABULARY = 150_000
_HEADER = struct.Struct("<4sBQQ")
_RESPONSE_FLOATS = ("logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs")
_TENSORS = ("tokens", *_RESPONSE_FLOATS, "action_mask", "chosen", "rejected", "routed_experts")
_PLAIN = (
    "reward", "truncate_status", "info", "metrics", "prompt_length", "response_text", "prompt_text", "messages",
    "tools", "chosen_messages", "rejected_messages",
)  # fmt: skip


@dataclass
class ReferenceEID:
    """Identity as the reference has it."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: secrets.token_hex(3))


class ReferenceExperience:
    """Stands in for the reference's experience: the same fields, and a constructor that does the same work."""

    def __init__(
        self,
        *,
        eid: ReferenceEID | dict[str, Any] | None = None,
        tokens: Any,
        logprobs: Any = None,
        reward: float | None = None,
        token_level_reward: Any = None,
        advantages: Any = None,
        returns: Any = None,
        truncate_status: str | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        prompt_length: int = 1,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: Any = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        chosen: Any = None,
        rejected: Any = None,
        chosen_messages: list[dict[str, Any]] | None = None,
        rejected_messages: list[dict[str, Any]] | None = None,
        multi_modal_inputs: dict[str, Any] | None = None,
        teacher_logprobs: Any = None,
        custom_fields: list[Any] | None = None,
        routed_experts: Any = None,
    ) -> None:
        self.eid = ReferenceEID() if eid is None else ReferenceEID(**eid) if isinstance(eid, dict) else eid
        self.tokens = _tensor(tokens, torch.int32)
        self.logprobs = _tensor(logprobs, torch.float32)
        self.reward = reward
        self.token_level_reward = _tensor(token_level_reward, torch.float32)
        self.advantages = _tensor(advantages, torch.float32)
        self.returns = _tensor(returns, torch.float32)
        self.truncate_status = truncate_status
        self.info = info or {}
        self.metrics = metrics or {}
        self.prompt_length = prompt_length
        self.response_text = response_text
        self.prompt_text = prompt_text
        self.action_mask = _tensor(action_mask, torch.bool)
        self.messages = messages
        self.tools = tools
        self.chosen = _tensor(chosen, torch.int32)
        self.rejected = _tensor(rejected, torch.int32)
        self.chosen_messages = chosen_messages
        self.rejected_messages = rejected_messages
        self.multi_modal_inputs = multi_modal_inputs and {
            key: value if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in multi_modal_inputs.items()
        }
        self.teacher_logprobs = _tensor(teacher_logprobs, torch.float32)
        self.custom_fields = custom_fields or []
        self.routed_experts = _tensor(routed_experts, torch.uint8)
        if action_mask is not None:
            self.experience_type = "multi_turn"
        elif chosen is not None and rejected is not None:
            self.experience_type, self.prompt_length = "dpo", len(tokens)
        else:
            self.experience_type = "single_turn"
            if not 0 < prompt_length < len(tokens):
                raise AssertionError(f"{len(tokens)} tokens for a prompt of {prompt_length}")
            self.action_mask = torch.ones(len(tokens) - prompt_length, dtype=torch.bool)


def _tensor(value: Any, dtype: torch.dtype) -> Tensor | None:
    if isinstance(value, list):
        return torch.tensor(value, dtype=dtype)
    return value if value is None or isinstance(value, Tensor) else torch.tensor(value)


def reference_encode(experiences: list[ReferenceExperience]) -> bytes:
    """Return the reference's body."""
    items: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def add(name: str, value: Tensor) -> None:
        tensor = value.detach().contiguous().cpu()
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in storages:  # safetensors refuses tensors that share storage
            tensor = tensor.clone()
            pointer = tensor.untyped_storage().data_ptr()
        storages.add(pointer)
        tensors[name] = tensor

    for index, experience in enumerate(experiences):
        item: dict[str, Any] = {"eid": asdict(experience.eid)}
        item |= {name: getattr(experience, name) for name in _PLAIN}
        item["custom_fields"] = list(experience.custom_fields)
        item["multi_modal_input_keys"] = list(experience.multi_modal_inputs or ())
        items.append(item)
        for name in _TENSORS:
            value = getattr(experience, name)
            if value is not None:
                add(f"{index}:{name}", value)
        for key, value in (experience.multi_modal_inputs or {}).items():
            add(f"{index}:multi_modal_inputs:{key}", value)
    head = pickle.dumps({"version": 1, "num_items": len(items), "items": items}, protocol=pickle.HIGHEST_PROTOCOL)
    tail: bytes = safetensors.torch.save(tensors)
    return _HEADER.pack(b"TRXP", 1, len(head), len(tail)) + head + tail


def reference_decode(data: bytes) -> list[ReferenceExperience]:
    """Return the experiences in the reference's body."""
    magic, version, head_length, tail_length = _HEADER.unpack_from(data)
    if magic != b"TRXP" or version != 1:
        raise ValueError(f"{magic!r} version {version}")
    start = _HEADER.size + head_length
    content = pickle.loads(data[_HEADER.size : start])
    tensors = safetensors.torch.load(data[start : start + tail_length])
    result = []
    for index, item in enumerate(content["items"]):
        keys = item.pop("multi_modal_input_keys")
        item |= {name: tensors.get(f"{index}:{name}") for name in _TENSORS}
        inputs = {key: tensors[f"{index}:multi_modal_inputs:{key}"] for key in keys}
        result.append(ReferenceExperience(multi_modal_inputs=inputs or None, **item))
    return result


def make_batch(count: int, length: int) -> tuple[list[Experience], list[ReferenceExperience]]:
    """Return the same ``count`` experiences of about ``length`` tokens in our form and in the reference's."""
    random = np.random.default_rng(count * length)
    prompt_length = length // 8
    responses = (random.uniform(0.75, 1.25, count) * (length - prompt_length)).astype(int)
    groups = -(-count // RUNS_PER_TASK)
    text = iter(np.split(token_ids(random, responses.sum() + groups * prompt_length), np.cumsum(responses)))
    answers = [next(text) for _ in range(count)]
    prompts = next(text).reshape(groups, prompt_length)
    ours, theirs = [], []
    for number, answer in enumerate(answers):
        task, run = divmod(number, RUNS_PER_TASK)
        certain = 10.0 ** random.uniform(-6, -1, len(answer))
        unsure = random.exponential(1.0, len(answer))
        reward = float(random.integers(2))
        values: dict[str, Any] = {
            "tokens": torch.from_numpy(np.concatenate([prompts[task], answer])),
            "logprobs": torch.from_numpy(-np.where(random.random(len(answer)) < 0.6, certain, unsure)).float(),
            "action_mask": torch.ones(len(answer), dtype=torch.bool),
            "prompt_length": prompt_length,
            "reward": reward,
            "info": {"finish_reason": "stop", "group_size": RUNS_PER_TASK, "correct": reward > 0},
            "metrics": {"accuracy": reward, "format_score": float(random.random()), "run_seconds": random.random()},
        }
        eid: dict[str, Any] = {"batch": 17, "task": f"{17 * groups + task}", "run": run, "step": 0}
        versions = [(0, 1, 40)] if run else [(0, 1, 40), (len(answer) // 2, 1, 41)]
        ours.append(Experience(eid=EID(**eid), versions=versions, temperature=1.0, **values))
        theirs.append(ReferenceExperience(eid=ReferenceEID(**eid), **values))
    return ours, theirs


def token_ids(random: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
    """Return ``count`` token ids that are about as frequent, and as often in phrases, as those of text."""
    weights = np.cumsum(1.0 / np.arange(3, VOCABULARY + 3) ** 1.05)
    identity = random.permutation(VOCABULARY).astype(np.int32)

    def draw(size: int, kinds: int) -> npt.NDArray[np.intp]:
        found: npt.NDArray[np.intp] = np.searchsorted(weights[:kinds], random.random(size) * weights[kinds - 1])
        return found

    phrases = identity[draw(20_000 * 8, VOCABULARY)].reshape(20_000, 8)
    lengths = random.integers(2, 9, 20_000)
    task_slices = count // 6 + 16
    chosen, singles = draw(task_slices, 20_000), identity[draw(task_slices * 5, VOCABULARY)].reshape(task_slices, 5)
    stream = [part for n, row in zip(chosen, singles, strict=True) for part in (phrases[n, : lengths[n]], row)]
    return np.concatenate(stream)[:count]


def measure(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of each call; all calls in turn, for about ``seconds`` and at least twice."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        rounds += 1
        gc.collect()
        gc.disable()
        for name in list(calls) if rounds % 2 else reversed(calls):
            calls[name]()  # nobody pays for what another left in the caches
            started = time.perf_counter()
            result = calls[name]()
            times[name].append((time.perf_counter() - started) * 1e3)
            del result
        gc.enable()
    return times


def compare(shape: tuple[int, int], seconds: float) -> tuple[list[str], dict[str, float]]:
    """Print what one shape shows; return the targets that it misses, and how many times faster ours is, by name."""
    ours, theirs = make_batch(*shape)
    body, packed, other = encode(ours), encode(ours, compression="zstd"), reference_encode(theirs)
    if decode(body) != ours or decode(packed) != ours or ExperienceBatch.decode(body).to_list() != ours:
        raise SystemExit(f"{shape}: what was decoded is not what was encoded")
    calls: dict[str, Callable[[], Any]] = {
        "encode ref": lambda: reference_encode(theirs),
        "encode": lambda: encode(ours),
        "list ref": lambda: reference_decode(other),
        "list": lambda: decode(body),
        "batch": lambda: ExperienceBatch.decode(body),
        "opened": lambda: ExperienceBatch.decode(body).settle(),
        "copy": lambda: bytearray(body),
    }
    times = measure(calls, seconds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    least = {name: min(values) for name, values in times.items()}
    bound = COPIES * middle["copy"] + COPY_EXTRA_MS
    print(f"\n{shape[0]} x {shape[1]} tokens, {len(times['copy'])} rounds{'ref':>14}{'ours':>21}{'ratio':>17}")
    missed, ratios = [], {}
    for name, before, now, targets in (
        ("encode", "encode ref", "encode", ENCODE_TARGETS),
        ("decode to a list", "list ref", "list", LIST_TARGETS),
        ("decode to a batch", "list ref", "batch", BATCH_TARGETS),
        ("... with all opened", "list ref", "opened", {}),
    ):
        ratio, target = middle[before] / middle[now], targets.get(shape, 0.0)
        ratios[f"{shape[0]} x {shape[1]}: {name}"] = ratio
        print(
            f"  {name:22}{middle[before]:9.3f} [{least[before]:7.3f}]  {middle[now]:9.3f} [{least[now]:7.3f}] ms"
            f"{ratio:7.2f} [{least[before] / least[now]:6.2f}]" + (f"  wanted {target:.0f}" if target else "")
        )
        if ratio < target:
            missed.append(f"{shape[0]}x{shape[1]}: {name} {ratio:.2f} times faster, wanted {target:.0f}")
    print(
        f"  {'copying the body':22}{middle['copy']:9.3f} [{least['copy']:7.3f}]  {middle['batch']:9.3f} "
        f"[{least['batch']:7.3f}] ms   bound {COPIES} x copy + {COPY_EXTRA_MS:.0f} ms = {bound:.3f}"
    )
    print(
        f"  {'bytes':22}{len(other):19}  {len(body):19}   {len(body) / len(other):7.3f}   zstd {len(packed)} "
        f"{len(packed) / len(other):.3f}"
    )
    if shape == COPY_SHAPE and middle["batch"] > bound:
        missed.append(f"{shape[0]}x{shape[1]}: decode to a batch {middle['batch']:.3f} ms, wanted {bound:.3f}")
    if len(body) > len(other) or len(packed) > ZSTD_TARGET * len(other):
        missed.append(f"{shape[0]}x{shape[1]}: {len(body)} bytes, zstd {len(packed)}, reference {len(other)}")
    return missed, ratios


def main() -> None:
    """Measure all shapes and print one table: medians, and the least of each in brackets."""
    import figures

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small batches, two rounds: does it still run?")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    figures.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes, seconds = (QUICK_SHAPES, 0.0) if options.quick else (SHAPES, SECONDS_PER_SHAPE)
    print("milliseconds: median [least]; one thread")
    found = [compare(shape, seconds) for shape in shapes]
    figures.write(options, {name: ratio for _, ratios in found for name, ratio in ratios.items()})
    missed = [line for lines, _ in found for line in lines]
    print("\n" + "\n".join(missed or ["no target of these shapes is missed"]))
    if options.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
