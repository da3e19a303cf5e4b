"""A rank of test_sharded_learner.py: rank 0 starts the others, and all train the same cases.

python -m tests.unit.training.sharded_rank MODEL_FOLDER OUT_FOLDER CHECKPOINT_OR_EMPTY CASE...

With ``KILLED_AT=step`` in the environment rank 1 is killed by SIGKILL when it has got this command, before it does its
part; with ``KILLS_RANK_0_AT=step`` rank 0. With ``DAMAGED=FOLDER`` all are first told to open this checkpoint. With
``FAILS_AT=step`` rank 1 fails once at this command: before its part with ``FAILS_WITH=memory``, else after it, when no
collective is left.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.training.test_composed_losses import SETTINGS, rows, with_algorithm
from tests.unit.training.test_critic_and_reference import rewarded
from tests.unit.training.test_learner import config
from trinity_mq.config import Config
from trinity_mq.config.model import LoraConfig
from trinity_mq.experience import Experience
from trinity_mq.runtime.errors import EXIT_RESTART, FatalError
from trinity_mq.sync.channels.buckets import packed, plan
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.parallel.ranks import RankCommand, RankError, RankProcesses, Ranks, begin_follower, own_rank

WORLD = 2
PPO: dict[str, Any] = {
    "algorithm_type": "ppo",
    "kl": {"kind": "k2", "coef": 0.1},
    "reward_kl": {"kind": "k1", "coef": 0.05},
    "reference": {"update": "ema", "every_steps": 1, "decay": 0.5},
    "critic": {"lr": 1e-3},
}
MINI_BATCHES = {"mini_batches": 2, "epochs": 2}
LORA = {"kl": {"kind": "k2", "coef": 0.1}}  # its reference is the model without the adapters
CASES: dict[str, dict[str, Any]] = {**SETTINGS, "ppo": PPO, "mini_batches": MINI_BATCHES, "lora": LORA}


def settings(case: str, dtype: str = "float32") -> Config:
    """Return the configuration of a case: small micro-batches, so that ranks have several, and not equally many.

    Prefixes are not shared: one process alone can, and would round otherwise.
    """
    # mini-batches make four optimizer steps of a train step: the weights move as far as in the other cases
    base = config(lr=2.5e-4 if case == "mini_batches" else 1e-3, max_tokens=40, dtype=dtype, entropy_coef=0.01)
    found = with_algorithm(base, **CASES[case])
    found = found.model_copy(update={"trainer": found.trainer.model_copy(update={"share_prefixes": False})})
    if case != "lora":
        return found
    return found.model_copy(update={"model": found.model.model_copy(update={"lora": LoraConfig(r=4, alpha=16)})})


def experiences(case: str, step: int) -> list[Experience]:
    """Return what train step ``step`` of a case trains on."""
    return rewarded(step) if case == "ppo" else rows("grpo" if case == "lora" else case, 5 + step)


async def train(learner: TorchLearner, case: str, first: int, last: int) -> list[dict[str, float]]:
    """Do train steps ``first`` to ``last``; return their metrics."""
    return [await learner.step(experiences(case, step), step) for step in range(first, last + 1)]


async def flats_of(learner: TorchLearner) -> list[torch.Tensor]:
    """Return the weights as a weight sync has them."""
    weights, buckets = await learner.weights(), plan(await learner.manifest(), 4096)
    return await asyncio.to_thread(lambda: list(packed(buckets, weights)))


async def lead(model: Path, out: Path, checkpoint: Path | None, cases: list[str]) -> None:
    ranks = Ranks(0, WORLD, 60.0)
    processes = RankProcesses(ranks)
    await processes.start()
    watching = asyncio.create_task(processes.watch())  # as beside a trainer: it tells who waits for a rank that is gone
    try:
        await lead_cases(ranks, model, out, checkpoint, cases)
        await processes.end()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def lead_cases(ranks: Ranks, model: Path, out: Path, checkpoint: Path | None, cases: list[str]) -> None:
    for case in cases:
        learner = TorchLearner(settings(case), model, None, ranks)
        (out / case).mkdir()
        if damaged := os.environ.get("DAMAGED"):
            with pytest.raises(DamagedCheckpointError):
                await learner.open(Path(damaged))
        await learner.open(checkpoint)
        metrics = await train(learner, case, 3 if checkpoint else 1, 3)
        flats = await flats_of(learner)
        torch.save(
            {"metrics": metrics, "flats": flats, "canary": await learner.canary_logprobs([2, 3, 4, 5])},
            out / case / "found.pt",
        )
        (out / case / "saved").mkdir()
        await (await learner.stage())(out / case / "saved")
        await learner.close()


class Mortal(Ranks):
    """Ends at the command that the environment names."""

    def next(self, patience: float = math.inf) -> RankCommand:
        command = super().next(patience)
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun and Ctrl-C do: rank 0 decides when a rank ends
        if command.name == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if command.name == os.environ.get("KILLS_RANK_0_AT"):
            os.kill(os.getppid(), signal.SIGKILL)
        return command


class Failing(TorchLearner):
    """Fails once, at the command that the environment names."""

    has_failed = False

    def _execute(self, command: RankCommand) -> None:
        fails = command.name == os.environ.get("FAILS_AT") and not self.has_failed
        self.has_failed |= fails
        if fails and os.environ["FAILS_WITH"] == "memory":
            raise torch.OutOfMemoryError("no memory is left")
        super()._execute(command)
        if fails:
            raise {"damage": DamagedCheckpointError, "fault": FatalError}[os.environ["FAILS_WITH"]]("it does not load")


def follow(model: Path, cases: list[str]) -> None:
    begin_follower()
    ranks = Mortal(own_rank(), WORLD, 60.0)
    torch.set_num_threads(1)
    for case in cases:
        Failing(settings(case), model, None, ranks).follow()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if own_rank():
        follow(Path(arguments[0]), arguments[3:])
    else:
        began = Path(arguments[2]) if arguments[2] else None
        try:
            asyncio.run(lead(Path(arguments[0]), Path(arguments[1]), began, arguments[3:]))
        except RankError as error:
            sys.stdout.write(f"rank error: {error}\n")
            sys.stdout.flush()
            os._exit(EXIT_RESTART)
    os._exit(0)  # gloo's threads may abort a process that takes itself apart
