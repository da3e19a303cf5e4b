"""Functions that make tensors and groups of experiences against plain loops over them, on lists and on batches.

    python benchmarks/bench_gather.py [--quick] [--check] [--json FILE]

The plain loops here are also what the tests compare every result with: one experience after the other, nothing clever.
All sides take turns in one process, on one thread. ``--check`` exits with 1 if one of ours is slower than its loop.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience import (
    EID,
    Experience,
    ExperienceBatch,
    gather_action_masks,
    gather_attention_masks,
    gather_multi_modal_inputs,
    gather_response_attrs,
    gather_token_ids,
    group_by,
    split_dpo_experience_to_single_turn,
)

SHAPES = ((8, 512), (64, 1024), (256, 256), (256, 2048))
"""Experiences and mean tokens of each."""
QUICK_SHAPES = ((8, 64),)
SECONDS_PER_SHAPE = 4.0
NOISE = 1.1
"""Ratio of times that still counts as not slower, on a machine that does other things too."""


def plain_token_ids(experiences: Sequence[Experience], prompts: int, responses: int, pad: int) -> Tensor:
    """Return what :func:`gather_token_ids` should."""
    _check_widths(experiences, prompts, responses)
    result = torch.full((len(experiences), prompts + responses), pad, dtype=torch.int32)
    for row, experience in zip(result, experiences, strict=True):
        start = prompts - experience.prompt_length
        row[start : start + len(experience.tokens)] = experience.tokens
    return result


def plain_attention_masks(experiences: Sequence[Experience], prompts: int, responses: int) -> Tensor:
    """Return what :func:`gather_attention_masks` should."""
    _check_widths(experiences, prompts, responses)
    result = torch.zeros((len(experiences), prompts + responses), dtype=torch.bool)
    for row, experience in zip(result, experiences, strict=True):
        start = prompts - experience.prompt_length
        row[start : start + len(experience.tokens)] = True
    return result


def plain_response_attrs(experiences: Sequence[Experience], name: str, responses: int, pad: int = 0) -> Tensor:
    """Return what :func:`gather_response_attrs` should."""
    values = [getattr(experience, name, None) for experience in experiences]
    present = [value for value in values if isinstance(value, Tensor) and value.dim() == 1]
    if not values or len(present) < len(values) or any(len(value) > responses for value in present):
        raise ValueError("empty, absent or too long")
    dtype = reduce(torch.promote_types, [value.dtype for value in present])
    result = torch.full((len(values), responses), pad, dtype=dtype)
    for row, value in zip(result, present, strict=True):
        row[: len(value)] = value
    return result


def plain_multi_modal_inputs(experiences: Sequence[Experience]) -> dict[str, list[Tensor]]:
    """Return what :func:`gather_multi_modal_inputs` should."""
    first = experiences[0].multi_modal_inputs or {} if experiences else None
    result: dict[str, list[Tensor]] = {key: [] for key in first or ()}
    for experience in experiences:
        inputs = experience.multi_modal_inputs or {}
        if set(inputs) != set(result):
            raise ValueError("different inputs")
        for key, value in inputs.items():
            result[key].append(value)
    if first is None:
        raise ValueError("empty")
    return result


def plain_group_by(experiences: Sequence[Experience], id_type: str) -> dict[str, list[Experience]]:
    """Return what :func:`group_by` should."""
    if id_type not in {"task", "run", "step"}:
        raise ValueError("unknown id_type")
    result: dict[str, list[Experience]] = {}
    for experience in experiences:
        eid = experience.eid
        task = str(eid.task).replace("%", "%25").replace("/", "%2F")
        key = f"{eid.batch}/{task}" + ("" if id_type == "task" else f"/{eid.run if id_type == 'run' else eid.step}")
        if key not in result:
            result[key] = []
        result[key].append(experience)
    return result


def plain_split_dpo(experiences: Sequence[Experience]) -> list[Experience]:
    """Return what :func:`split_dpo_experience_to_single_turn` should, but for the random suffixes of the ids."""
    result = []
    for pair in experiences:
        if pair.experience_type != "dpo" or pair.chosen is None or pair.rejected is None:
            raise ValueError("not dpo")
        for response, messages in ((pair.chosen, pair.chosen_messages), (pair.rejected, pair.rejected_messages)):
            result.append(
                Experience(
                    eid=EID(pair.eid.batch, pair.eid.task, pair.eid.run, pair.eid.step),
                    tokens=torch.cat([pair.tokens, response]),
                    prompt_length=len(pair.tokens),
                    reward=pair.reward,
                    info=pair.info,
                    metrics=pair.metrics,
                    prompt_text=pair.prompt_text,
                    messages=messages,
                    tools=pair.tools,
                    truncate_status=pair.truncate_status,
                    multi_modal_inputs=pair.multi_modal_inputs,
                    custom_fields=pair.custom_fields,
                    temperature=pair.temperature,
                    taskset=pair.taskset,
                    index=pair.index,
                    experience_type="single_turn",
                )
            )
    return result


def _check_widths(experiences: Sequence[Experience], prompts: int, responses: int) -> None:
    if not experiences:
        raise ValueError("empty")
    for experience in experiences:
        if experience.prompt_length > prompts or len(experience.tokens) - experience.prompt_length > responses:
            raise ValueError("too long")


def make_experiences(count: int, length: int) -> tuple[list[Experience], list[Experience]]:
    """Return ``count`` experiences in groups of 8 and as many preference pairs."""
    generator = torch.Generator().manual_seed(count * length)
    prompt = length // 8
    responses = torch.randint((length - prompt) * 3 // 4, (length - prompt) * 5 // 4, (count,), generator=generator)
    singles, pairs = [], []
    for number, response in enumerate(responses.tolist()):
        tokens = torch.randint(0, 150_000, (prompt + response,), generator=generator, dtype=torch.int32)
        eid = EID(17, number // 8, number % 8, 0)
        singles.append(
            Experience(
                eid=eid,
                tokens=tokens,
                prompt_length=prompt,
                logprobs=-torch.rand(response, generator=generator),
                multi_modal_inputs={"pixels": torch.rand(4, 4, generator=generator)},
            )
        )
        pairs.append(Experience(eid=eid, tokens=tokens[:prompt], chosen=tokens[prompt:], rejected=tokens[:response]))
    return singles, pairs


Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def contestants(prompts: int, responses: int) -> dict[str, Pair]:
    """Return for each function its plain loop and itself, both on experiences alone."""
    return {
        "gather_token_ids": (
            lambda given: plain_token_ids(given, prompts, responses, 0),
            lambda given: gather_token_ids(given, prompts, responses, 0),
        ),
        "gather_attention_masks": (
            lambda given: plain_attention_masks(given, prompts, responses),
            lambda given: gather_attention_masks(given, prompts, responses),
        ),
        "gather_action_masks": (
            lambda given: plain_response_attrs(given, "action_mask", responses),
            lambda given: gather_action_masks(given, responses),
        ),
        "gather_response_attrs": (
            lambda given: plain_response_attrs(given, "logprobs", responses),
            lambda given: gather_response_attrs(given, "logprobs", responses),
        ),
        "gather_multi_modal_inputs": (plain_multi_modal_inputs, gather_multi_modal_inputs),
        "group_by": (lambda given: plain_group_by(given, "task"), lambda given: group_by(given, "task")),
        "split_dpo": (plain_split_dpo, split_dpo_experience_to_single_turn),
    }


def compare(shape: tuple[int, int], seconds: float) -> tuple[list[str], dict[str, float]]:
    """Print what one shape shows.

    Returns:
        What is slower than its loop over the same input; how many times faster ours are on lists and on batches, as
        geometric means over the functions.
    """
    singles, pairs = make_experiences(*shape)
    sides = contestants(shape[1] // 8, shape[1] * 5 // 4)
    print(f"\n{f'{shape[0]} x {shape[1]} tokens':30}{'list: loop':>12}{'ours':>12}{'batch: loop':>16}{'ours':>12}  ms")
    slower = []
    faster: dict[str, list[float]] = {"list": [], "batch": []}
    for name, (plain, ours) in sides.items():
        given = pairs if name == "split_dpo" else singles
        batch = ExperienceBatch.of(given)
        calls = {"loop": (plain, given), "list": (ours, given), "loop on batch": (plain, batch), "batch": (ours, batch)}
        times = measure(calls, seconds / len(sides))
        print(
            f"  {name:28}{times['loop']:12.3f}{times['list']:12.3f}{times['loop on batch']:16.3f}{times['batch']:12.3f}"
        )
        slower += [
            f"{shape[0]}x{shape[1]}: {name} on a {kind} {times[kind]:.3f} ms, loop {times[loop]:.3f} ms"
            for kind, loop in (("list", "loop"), ("batch", "loop on batch"))
            if times[kind] > NOISE * times[loop]
        ]
        for kind, loop in (("list", "loop"), ("batch", "loop on batch")):
            faster[kind].append(times[loop] / times[kind])
    means = {kind: statistics.geometric_mean(ratios) for kind, ratios in faster.items()}
    return slower, {f"{shape[0]} x {shape[1]}: {kind}": mean for kind, mean in means.items()}


def measure(calls: dict[str, tuple[Callable[..., Any], Any]], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each call; all in turn, for about ``seconds`` and at least three times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    while len(times["loop"]) < 3 or time.perf_counter() < end:
        for name, (call, given) in calls.items():
            started = time.perf_counter()
            result = call(given)
            times[name].append((time.perf_counter() - started) * 1e3)
            del result
    gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure all shapes and print one table of medians."""
    import figures

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small batch: does it still run?")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is slower than its plain loop")
    figures.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes, seconds = (QUICK_SHAPES, 0.0) if options.quick else (SHAPES, SECONDS_PER_SHAPE)
    found = [compare(shape, seconds) for shape in shapes]
    figures.write(options, {name: ratio for _, ratios in found for name, ratio in ratios.items()})
    slower = [line for lines, _ in found for line in lines]
    print("\n" + "\n".join(slower or ["nothing is slower than its plain loop"]))
    if options.check and slower:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
