"""``trinity-mq plan``: shows the GPU of each process of a run, its estimated memory, and the memory that is left."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trinity_mq.cli.arguments import add_target
from trinity_mq.config import Config
from trinity_mq.engines.host.ready_file import free_gpus
from trinity_mq.errors import CommandError
from trinity_mq.operations.memory import estimate_memory
from trinity_mq.operations.plan import RunPlan
from trinity_mq.operations.validate import needs_cuda
from trinity_mq.runtime.gpus import MOST, Gpu, GpuReport
from trinity_mq.runtime.placement import Placement, PlacementError, place_engines, place_run, place_trainer, run_needs
from trinity_mq.targets.target import load_target_configuration, load_target_stages

Number = TypeVar("Number", int, float)
PARTS: Mapping[str, Callable[[Config, Sequence[Gpu]], Placement]] = {"trainer": place_trainer, "engines": place_engines}
"""Parts of a run that a machine of ``trinity-mq node`` can run alone, each with the function that places it on the
machine's GPUs."""
SINGLE_GIB, SEVERAL_GIB = 24.0, 80.0
"""Default memory of a pretended GPU in GiB: of a single GPU, and of each of several GPUs."""
MOST_GIB = 2.0**20
"""Maximum memory of a pretended GPU in GiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq plan``."""
    add_target(parser)
    parser.add_argument(
        "--gpus", type=_above_zero(int, MOST), metavar="N", help="pretend that N GPUs are here (default: the GPUs here)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=_above_zero(float, MOST_GIB),
        metavar="GIB",
        help=f"memory of each pretended GPU in GiB (default: {SINGLE_GIB:g} for one GPU, else {SEVERAL_GIB:g})",
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="plan a machine with this part of the run alone: a host of trinity-mq node in --trainers or in --engines",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.epilog = "Exit code 1: the run does not fit. Memory is estimated, not measured."


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of the run of TARGET, or of each stage of the file. Return 1 if a run does not fit, else 0."""
    if arguments.gpu_memory is not None and arguments.gpus is None:
        raise CommandError(f"--gpu-memory {arguments.gpu_memory:g} is for pretended GPUs: give --gpus N too")
    stages = load_target_stages(arguments)
    configs = {f"stage {stage.name}": stage.config for stage in stages} or {"": load_target_configuration(arguments)}
    wanted = (arguments.gpus, arguments.gpu_memory, arguments.only)
    plans = {title: _plan(config, *wanted) for title, config in configs.items()}
    if arguments.json:
        reports = {title.removeprefix("stage "): report for title, (report, _) in plans.items()}
        print(json.dumps({"stages": reports} if stages else reports[""], indent=2, ensure_ascii=False))
    else:
        print("\n".join(line for title, (_, lines) in plans.items() for line in [*filter(None, [title]), *lines]))
    return 0 if all(report["fits"] for report, _ in plans.values()) else 1


def _plan(config: Config, count: int | None, gib: float | None, part: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the plan of a run as a JSON object and as lines. ``count`` is the number of pretended GPUs (None: the GPUs
    of this machine), ``gib`` the memory of each, ``part`` the part of the run that this machine runs (None: all).
    """
    report = free_gpus(config.path) if count is None else GpuReport(_pretended(count, gib))
    if not report.gpus and run_needs(config):
        where = f"no GPU can be used here ({report.why}); --gpus N shows the plan on N GPUs"
        fits = not needs_cuda(config)
        return _empty(config, [] if fits else [where]), [where]
    try:
        placement = PARTS[part](config, report.gpus) if part else place_run(config, report.gpus)
    except PlacementError as error:
        return _empty(config, [str(error)]), [f"does not fit: {error}"]
    knows_memory = placement.needs and all(gpu.total is not None for gpu in report.gpus)
    plan = RunPlan(config, placement, estimate_memory(config, "cuda") if knows_memory else None)
    problems = [f"does not fit: {problem}" for problem in plan.problems]
    title = "estimated" if count is None else f"on {count} pretended GPU{'s' if count > 1 else ''}, estimated"
    title = f"{part} only, {title}" if part else title
    return plan.as_json(), [f"run {config.name!r}, {title}:", *plan.lines(), *problems]


def _empty(config: Config, problems: list[str]) -> dict[str, Any]:
    return {"run": config.name, "gpus": [], "processes": [], "problems": problems, "fits": not problems}


def _pretended(count: int, gib: float | None) -> list[Gpu]:
    memory = round((gib or (SINGLE_GIB if count == 1 else SEVERAL_GIB)) * 2**30)
    return [Gpu(entry=str(number), name="pretended", total=memory, free=memory) for number in range(count)]


def _above_zero(number: Callable[[str], Number], most: Number) -> Callable[[str], Number]:
    def parsed(word: str) -> Number:
        if not 0 < (value := number(word)) <= most:  # also refuses nan
            raise argparse.ArgumentTypeError(f"{word} is given, wanted a number above 0 and at most {most:.0f}")
        return value

    parsed.__name__ = "number"  # argparse names it in its own error
    return parsed
