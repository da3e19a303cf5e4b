"""Peak host memory of the ranks of a trainer while they load a model, save a checkpoint and resume from it.

    python benchmarks/bench_ranks.py [--ranks 1 2 4] [--layers 12] [--folder FOLDER] [--quick] [--check] [--json FILE]

Each measurement is the highest ``VmHWM`` of a phase minus the memory before the model is loaded, in whole copies of the
model's float32 weights. *load* is the start of a run. *save* is a checkpoint with the state of Adam, from its copy
until all ranks have written it. *resume* is the start of another run from this checkpoint. The baseline is a trainer of
one process in the same run. ``--check`` exits with 1 if a rank of the largest number of ranks needs more than .6 of the
baseline to load, or more than 2.5 times its share of the baseline to save.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench_checkpoint import experiences
from trinity_mq.config import Config, load_config
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.parallel.ranks import RankCommand, RankProcesses, Ranks, begin_follower, own_rank

LOAD_LIMIT, SAVE_LIMIT = 0.6, 2.5
PHASES = ("load", "save", "resume")


def configuration(model: Path, folder: Path) -> Config:
    """Return a run with the model."""
    sections = {
        "model": {"model_path": str(model), "device": "cpu"},
        "trainer": {"export": "last", "share_prefixes": False},
    }
    return load_config({"name": "bench", "run_dir": str(folder / "run"), **sections})


class Peak:
    """The growth of this process's memory since the first phase began, by phase in bytes."""

    def __init__(self) -> None:
        self.growth: dict[str, int] = {}
        self._phase, self._before = "", 0

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._phase, self._before = phase, self._before or self._status("VmRSS")

    def end(self) -> None:
        """End the phase, if one has begun."""
        if self._phase:
            self.growth[self._phase] = self._status("VmHWM") - self._before
        self._phase = ""

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


class Follower(TorchLearner):
    """Measures what a rank above 0 needs for a command. A checkpoint may be written after the command."""

    peak = Peak()

    def _execute(self, command: RankCommand) -> None:
        self.peak.end()
        if command.name in {"open", "copy"}:
            phase = "save" if command.name == "copy" else "resume" if command.arguments["checkpoint"] else "load"
            self.peak.begin(phase)
        super()._execute(command)
        if command.name == "open":
            self.peak.end()


async def lead(learner: TorchLearner, processes: RankProcesses, checkpoint: Path | None, folder: Path) -> Peak:
    """Do what rank 0 does: load, make a step and save, or resume."""
    await processes.start()
    peak = Peak()
    peak.begin("resume" if checkpoint else "load")
    await learner.open(checkpoint)
    peak.end()
    if checkpoint is None:
        await learner.step(experiences(1), 1)
        folder.mkdir()
        peak.begin("save")
        await (await learner.stage())(folder)
        peak.end()
    await learner.close()
    await processes.end()
    return peak


def run_rank(model: Path, folder: Path, world: int, resumes: bool) -> None:
    """Be a rank: rank 0 starts the others with its own command line."""
    disable_progress_bar()
    torch.set_num_threads(1)
    config = configuration(model, folder)
    ranks = Ranks(own_rank(), world)
    if own_rank():
        begin_follower()
        follower = Follower(config, model, None, ranks)
        follower.follow()
        follower.peak.end()
        peak = follower.peak
    else:
        checkpoint, learner = folder / "checkpoint", TorchLearner(config, model, None, ranks)
        peak = asyncio.run(lead(learner, RankProcesses(ranks, 60.0), checkpoint if resumes else None, checkpoint))
    name = f"{'resumed' if resumes else 'first'}-{own_rank()}.json"
    (folder / name).write_text(json.dumps(peak.growth))
    os._exit(0)  # gloo's threads may abort a process that takes itself apart


def measured(model: Path, folder: Path, world: int, whole: int) -> dict[str, list[float]]:
    """Return the peaks of each phase by rank, in whole copies of the weights."""
    folder.mkdir()
    for begins in ("first", "resumed"):
        arguments = ["--rank-of", str(world), "--model", str(model), "--folder", str(folder), "--begins", begins]
        subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.DEVNULL)
    growths: list[dict[str, int]] = []
    for rank in range(world):
        files = [json.loads((folder / f"{name}-{rank}.json").read_text()) for name in ("first", "resumed")]
        growths.append(files[0] | files[1])
    return {phase: [growth[phase] / whole for growth in growths] for phase in PHASES}


def main() -> int:
    """Run it."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12, help="12 make weights of 437 MB")
    parser.add_argument("--folder", type=Path, help="on the disk to write to (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="a small model and two ranks: does it run?")
    parser.add_argument("--check", action="store_true")
    for hidden in ("--rank-of", "--model", "--begins"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    figures.add_option(parser)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(Path(options.model), options.folder, int(options.rank_of), options.begins == "resumed")
    if options.quick:
        options.ranks, options.layers = [1, 2], 1
    shape: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=16000, num_hidden_layers=options.layers, num_key_value_heads=12, **shape)
    folder = Path(tempfile.mkdtemp(prefix="bench-ranks-", dir=options.folder))
    try:
        disable_progress_bar()
        model = LlamaForCausalLM(config)
        whole = 4 * sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder / "model")
        del model
        peaks = {world: measured(folder / "model", folder / str(world), world, whole) for world in options.ranks}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"weights: {whole / 1e6:,.0f} MB in float32; peaks in whole copies of the weights: rank 0, largest other")
    for world, phases in peaks.items():
        cells = [f"{name} {by_rank[0]:5.2f} {max(by_rank[1:], default=0):5.2f}" for name, by_rank in phases.items()]
        print(f"{world} ranks   {'   '.join(cells)}")
    most, least = max(options.ranks), min(options.ranks)
    ratios = {phase: max(peaks[most][phase]) / max(peaks[least][phase]) for phase in PHASES}
    figures.write(options, {f"{phase}, {most} ranks, of {least}": ratio for phase, ratio in ratios.items()})
    too_much = ratios["load"] > LOAD_LIMIT or ratios["save"] > SAVE_LIMIT * least / most
    return int(options.check and too_much)


if __name__ == "__main__":
    sys.exit(main())
