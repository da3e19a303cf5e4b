"""A learner on two ranks over gloo does what one process does, and each goes on from the other's checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.unit.training.test_composed_losses import SETTINGS, rows, with_algorithm
from tests.unit.training.test_critic_and_reference import rewarded
from tests.unit.training.test_learner import Opener, config
from trinity_mq.config import Config
from trinity_mq.config.model import LoraConfig
from trinity_mq.experience import Experience
from trinity_mq.runtime.errors import EXIT_FATAL, EXIT_RESTART, DeviceMemoryError, FatalError
from trinity_mq.sync.channels.base import Channel
from trinity_mq.sync.channels.buckets import packed, plan, split
from trinity_mq.sync.channels.checkpoint.channel import CheckpointChannel
from trinity_mq.sync.channels.collective.broadcast import TRANSPORTS, Backend
from trinity_mq.sync.channels.collective.channel import CollectiveChannel
from trinity_mq.sync.channels.memory.channel import MemoryChannel
from trinity_mq.sync.channels.receiver import WeightReceiver
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError
from trinity_mq.training.checkpoints.state import flat, read_parts, write_shard
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.model.policy import LearnerError, select_device
from trinity_mq.training.parallel.ranks import (
    RankCommand,
    RankError,
    RankProcesses,
    Ranks,
    begin_follower,
    own_device,
    own_rank,
    world_size,
)

BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")
WHOLE = ["grpo", "kl_cov", "mini_batches", "dpo", "ppo", "lora"]

pytestmark = pytest.mark.timeout(240)  # two processes import torch and FSDP


async def run_ranks(folder: Path, out: Path, *cases: str, begins: Path | None = None, **environment: str) -> Any:
    """Train the cases on two ranks to step 3, from a checkpoint of step 2 if one is given; return the exit code of rank
    0 and what both said. This file is the program of both: rank 0 starts the other.

    With ``RANKS=4`` in the environment there are more, with ``LAST=2`` no step is made after the checkpoint. With
    ``KILLED_AT=step`` rank 1 is killed by SIGKILL when it has got this command, before it does
    its part; with ``KILLS_RANK_0_AT=step`` rank 0. With ``DAMAGED=FOLDER`` all are first told to open this checkpoint.
    With ``FAILS_AT=step`` rank 1 fails once at this command: in its part with ``FAILS_WITH=memory``, else after it,
    when no collective is left.
    """
    out.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.training.test_sharded_learner", str(folder), str(out), str(begins or "")),
        *cases,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
    )
    try:
        async with asyncio.timeout(200):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()


async def two_ranks(folder: Path, out: Path, *cases: str, begins: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return what rank 0 found of each case."""
    code, said = await run_ranks(folder, out, *cases, begins=begins)
    assert code == 0, said
    return {case: torch.load(out / case / "found.pt", weights_only=True) for case in cases}


def apart(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Return what does not depend on the time, nor on how a step is cut."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "perf/")) and not math.isnan(value)
    }


async def test_weights_metrics_and_checkpoints_are_those_of_one_process(
    folder: Path, opened: Opener, tmp_path: Path
) -> None:
    alone: dict[str, tuple[list[dict[str, float]], TorchLearner]] = {}
    for case in WHOLE:
        learner = await opened(settings(case))
        alone[case] = (await train(learner, case, 1, 3), learner)
    out = tmp_path / "out"
    found = await two_ranks(folder, out, *WHOLE)
    for case, (metrics, learner) in alone.items():
        assert apart(found[case]["flats"], await flats_of(learner)) < 1e-6, case
        assert found[case]["canary"] == pytest.approx(await learner.canary_logprobs([2, 3, 4, 5]), abs=1e-5), case
        for one, other in zip(found[case]["metrics"], metrics, strict=True):
            assert comparable(one) == pytest.approx(comparable(other), abs=1e-5, rel=1e-4), case
        # a checkpoint of two ranks is gone on from by one process
        again = await opened(settings(case), checkpoint=out / case / "saved")
        assert apart(await flats_of(again), found[case]["flats"]) == 0.0, case
        await again.step(experiences(case, 4), 4)
        await learner.step(experiences(case, 4), 4)
        assert apart(await flats_of(again), await flats_of(learner)) < 1e-6, case


async def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(folder: Path, opened: Opener, tmp_path: Path) -> None:
    learner = await opened(settings("grpo"))
    (tmp_path / "damaged").mkdir()
    await learner.save(tmp_path / "damaged")
    for part in (tmp_path / "damaged" / "state").iterdir():
        part.write_bytes(b"no")
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", DAMAGED=str(tmp_path / "damaged"))
    assert code == 0, said
    found = torch.load(tmp_path / "out" / "grpo" / "found.pt", weights_only=True)
    await train(learner, "grpo", 1, 3)
    assert apart(found["flats"], await flats_of(learner)) < 1e-6


async def test_a_checkpoint_that_one_rank_alone_cannot_read_is_passed_over_by_all(
    folder: Path, opened: Opener, tmp_path: Path
) -> None:
    learner = await opened(settings("grpo"))
    await train(learner, "grpo", 1, 2)
    (tmp_path / "whole").mkdir()
    await learner.save(tmp_path / "whole")
    whole = str(tmp_path / "whole")
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", DAMAGED=whole, FAILS_AT="open", FAILS_WITH="damage")
    assert code == 0, said
    first = await opened(settings("grpo"))
    await train(first, "grpo", 1, 3)
    found = torch.load(tmp_path / "out" / "grpo" / "found.pt", weights_only=True)
    assert apart(found["flats"], await flats_of(first)) < 1e-6


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("step", "fault"),
        ("step", "memory"),
        *(pytest.param(one, "fault", marks=pytest.mark.extended) for one in ("canary", "copy", "gather", "write")),
    ],
)
async def test_a_command_that_fails_on_one_rank_fails_on_rank_0_with_its_reason(
    folder: Path, tmp_path: Path, command: str, fault: str
) -> None:
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", FAILS_AT=command, FAILS_WITH=fault)
    assert code != 0, said
    reasons = {
        "memory": "rank 1 failed first: out of memory in step; no memory is left; the estimate is",
        "fault": "on rank 1 of 2: it does not load",
    }
    assert (
        reasons[fault] if command != "write" else "rank 1 of 2 could not write its shards: no space is left"
    ) in said
    if fault == "memory":
        assert code == EXIT_FATAL, "a restart would not help"
        assert "trainer.gradient_checkpointing=true" in said
    assert not list((tmp_path / "out").glob("*/saved/state/.metadata")), "no checkpoint"


@pytest.mark.parametrize(
    "command",
    ["step", *(pytest.param(one, marks=pytest.mark.extended) for one in ("open", "canary", "copy", "gather", "write"))],
)
async def test_a_rank_that_dies_at_any_command_ends_rank_0_for_a_restart(
    folder: Path, tmp_path: Path, command: str
) -> None:
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", KILLED_AT=command)
    assert code == EXIT_RESTART, said
    assert "rank error: " in said
    assert not list((tmp_path / "out").glob("*/saved/state/.metadata")), "no checkpoint"


async def test_a_sync_gathers_each_weight_once_whoever_reads_it(folder: Path, tmp_path: Path) -> None:
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", "lora", SYNCS="yes")
    assert code == 0, said
    ways = [[pull, backend] for pull in ("memory", "checkpoint") for backend in BACKENDS]
    for case in ("grpo", "lora"):
        syncs = json.loads((tmp_path / "out" / case / "syncs.json").read_text())
        assert [sync["way"] for sync in syncs] == ways
        for sync in syncs:
            assert sync["arrived"], sync["way"]
            assert sync["pulled"], sync["way"]
            gathered = [name for names in sync["gathers"] for name in names]
            assert sorted(gathered) == sorted(sync["names"]), sync["way"]
            assert len(sync["gathers"]) < len(gathered), "block by block, not tensor by tensor"


@pytest.mark.extended
async def test_two_ranks_go_on_from_a_checkpoint_of_one_process(folder: Path, opened: Opener, tmp_path: Path) -> None:
    learner = await opened(settings("ppo"))
    await train(learner, "ppo", 1, 2)
    (tmp_path / "two").mkdir()
    await learner.save(tmp_path / "two")
    await train(learner, "ppo", 3, 3)
    [found] = (await two_ranks(folder, tmp_path / "out", "ppo", begins=tmp_path / "two")).values()
    assert apart(found["flats"], await flats_of(learner)) < 1e-6


@pytest.mark.extended
@pytest.mark.timeout(600)
async def test_a_checkpoint_is_the_same_whatever_number_of_ranks_read_and_wrote_it(
    folder: Path, opened: Opener, tmp_path: Path
) -> None:
    learner = await opened(settings("ppo"))
    await train(learner, "ppo", 1, 2)
    checkpoint = tmp_path / "1"
    checkpoint.mkdir()
    await learner.save(checkpoint)
    first = read_parts(checkpoint, {})
    for number in ("2", "4", "2"):
        out = tmp_path / f"from-{checkpoint.parent.name}-{number}"
        code, said = await run_ranks(folder, out, "ppo", begins=checkpoint, RANKS=number, LAST="2")
        assert code == 0, said
        checkpoint = out / "ppo" / "saved"
        assert len(list((checkpoint / "state").glob("*.distcp"))) == int(number)
        again = read_parts(checkpoint, {})
        assert flat(again).keys() == flat(first).keys()
        assert all(torch.equal(tensor, flat(first)[name]) for name, tensor in flat(again).items())
        assert again["memory"].facts == first["memory"].facts


@pytest.mark.parametrize("launcher", ["rank 0", "torchrun"])
def test_a_rank_computes_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    """No GPU is here: torch.cuda is a mock. FSDP takes the current device."""
    variable = "TRINITY_MQ_RANK_PARENT" if launcher == "rank 0" else "TORCHELASTIC_RUN_ID"
    for name, value in {variable: "1", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    current = [torch.device("cuda", 0)]
    groups: list[tuple[torch.device, Any]] = []
    gpus = {"is_available": lambda: True, "current_device": lambda: current[-1].index, "is_initialized": lambda: True}
    with (
        mock.patch.multiple(torch.cuda, **gpus, set_device=current.append, device_count=lambda: 2),
        mock.patch.object(Ranks, "_wait_for_all"),
        mock.patch(
            "torch.distributed.init_process_group",
            lambda *arguments, **options: groups.append((current[-1], options["device_id"])),
        ),
    ):
        ranks = Ranks(5, 2 if launcher == "rank 0" else 6)
        ranks.host()
        ranks.open(select_device("auto", ranks.world))
        assert groups == [(torch.device("cuda", 1), torch.device("cuda", 1))]
        assert current[-1] == select_device("cuda", ranks.world)
        with (
            mock.patch("torch.cuda.device_count", return_value=1),
            pytest.raises(LearnerError, match=r"2 ranks .* see 1 GPUs .*, wanted 2, .* trainer\.nproc"),
        ):
            select_device("auto", ranks.world)


@pytest.mark.parametrize("command", ["step", pytest.param("open", marks=pytest.mark.extended)])
async def test_without_rank_0_the_others_end(folder: Path, tmp_path: Path, command: str) -> None:
    """Their end closes the output that is read here."""
    code, said = await run_ranks(folder, tmp_path / "out", "grpo", KILLS_RANK_0_AT=command)
    assert code == -signal.SIGKILL, said


def test_what_a_cluster_says_of_ranks_of_its_own_is_not_about_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (own_rank(), own_device(0), world_size(1)) == (0, 0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (own_rank(), own_device(0), world_size(1)) == (3, 1, 8)


WORLD = int(os.environ.get("RANKS", "2"))
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


class Noted(Ranks):
    """Keeps what was gathered by command."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gathers: list[list[str]] = []

    def announce(self, command: str, body: bytes = b"", **arguments: Any) -> None:
        if command == "gather":
            self.gathers.append(arguments["weights"])
        super().announce(command, body, **arguments)


async def sync_each_way(learner: TorchLearner, ranks: Noted, out: Path) -> list[dict[str, Any]]:
    """Sync one version by each kind of pull and each backend, to one engine in this process."""
    TRANSPORTS["nccl"] = TRANSPORTS["gloo"]  # the path of live weights on a device, without a GPU
    manifest = await learner.manifest()
    truth = zip(plan(manifest, 4096), await flats_of(learner), strict=True)
    wanted = {name: tensor for bucket, flat in truth for name, tensor in split(bucket, flat)}
    syncs = []
    for pull in ("memory", "checkpoint"):
        for attempt, backend in enumerate(BACKENDS, 1):
            folder = str(out / f"{pull}-{backend}")
            pulls = (
                MemoryChannel("127.0.0.1", 4096, 30.0) if pull == "memory" else CheckpointChannel(folder, 4096, 30.0)
            )
            channel: Channel = CollectiveChannel("127.0.0.1", 4096, 30.0, backend, pulls)
            ranks.gathers.clear()
            where = await channel.offer((1, attempt), tensors := await learner.weights(), manifest)
            spec = {**where, "manifest": manifest, "epoch": attempt, "attempt": attempt, "rank": 1, "world": 2}
            arrived, _ = await asyncio.gather(
                WeightReceiver().receive({**spec, "seconds": 30.0}),
                channel.broadcast(tensors, manifest, attempt, attempt, 2),
            )
            await channel.committed((1, attempt), tensors, manifest)
            source = await channel.catch_up_source()
            assert source is not None
            pulled = await WeightReceiver().receive({**source[1], "manifest": manifest, "seconds": 30.0})
            syncs.append(
                {
                    "way": [pull, backend],
                    "names": list(wanted),
                    "gathers": list(ranks.gathers),
                    "arrived": all(torch.equal(arrived[name], tensor) for name, tensor in wanted.items()),
                    "pulled": all(torch.equal(pulled[name], tensor) for name, tensor in wanted.items()),
                }
            )
            await channel.close()
    return syncs


async def lead(model: Path, out: Path, checkpoint: Path | None, cases: list[str]) -> None:
    ranks = Noted(0, WORLD, 60.0)
    processes = RankProcesses(ranks)
    await processes.start()
    watching = asyncio.create_task(processes.watch())  # as beside a trainer: it tells who waits for a rank that is gone
    try:
        await lead_cases(ranks, model, out, checkpoint, cases)
        await processes.end()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def lead_cases(ranks: Noted, model: Path, out: Path, checkpoint: Path | None, cases: list[str]) -> None:
    for case in cases:
        learner = TorchLearner(settings(case), model, None, ranks)
        (out / case).mkdir()
        if damaged := os.environ.get("DAMAGED"):
            with pytest.raises(DamagedCheckpointError):
                await learner.open(Path(damaged))
        await learner.open(checkpoint)
        if "SYNCS" in os.environ:
            await learner.step(experiences(case, 1), 1)
            syncs = await sync_each_way(learner, ranks, out / case)
            (out / case / "syncs.json").write_text(json.dumps(syncs))
            await learner.close()
            continue
        metrics = await train(learner, case, 3 if checkpoint else 1, int(os.environ.get("LAST", "3")))
        flats = await flats_of(learner)
        torch.save(
            {"metrics": metrics, "flats": flats, "canary": await learner.canary_logprobs([2, 3, 4, 5])},
            out / case / "found.pt",
        )
        (out / case / "saved").mkdir()
        await (await learner.stage())(out / case / "saved")
        await learner.close()


class Mortal(Ranks):
    """Ends, or fails once, at the command that the environment names."""

    has_failed = False

    def next(self, patience: float = math.inf) -> RankCommand:
        command = super().next(patience)
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun and Ctrl-C do: rank 0 decides when a rank ends
        if command.name == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if command.name == os.environ.get("KILLS_RANK_0_AT"):
            os.kill(os.getppid(), signal.SIGKILL)
        return command

    @contextmanager
    def voting(self, what: str) -> Iterator[None]:
        with super().voting(what):
            fails = what == os.environ.get("FAILS_AT") and not self.has_failed
            self.has_failed |= fails
            if fails and os.environ["FAILS_WITH"] == "memory":
                _fill_memory_once()
            yield
            if fails:
                raise {"damage": DamagedCheckpointError, "fault": FatalError}[os.environ["FAILS_WITH"]](
                    "it does not load"
                )


def _fill_memory_once() -> None:
    """Let the next pass of a model lack memory, not the passes by which memory is measured after it."""

    def fail(_module: torch.nn.Module, _arguments: Any) -> None:
        hook.remove()
        raise torch.OutOfMemoryError("no memory is left")

    hook = register_module_forward_pre_hook(fail)


def _write_shard(*arguments: Any) -> Any:
    """Write as a rank does, or end or fail instead."""
    if os.environ.get("KILLED_AT") == "write":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("FAILS_AT") == "write":
        raise OSError("no space is left")
    return write_shard(*arguments)


def follow(model: Path, cases: list[str]) -> None:
    begin_follower()
    ranks = Mortal(own_rank(), WORLD, 60.0)
    torch.set_num_threads(1)
    with mock.patch("trinity_mq.training.learner.write_shard", _write_shard):
        for case in cases:
            with suppress(DeviceMemoryError):
                TorchLearner(settings(case), model, None, ranks).follow()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if own_rank():
        follow(Path(arguments[0]), arguments[3:])
    else:
        began = Path(arguments[2]) if arguments[2] else None
        try:
            asyncio.run(lead(Path(arguments[0]), Path(arguments[1]), began, arguments[3:]))
        except (RankError, DeviceMemoryError) as error:
            sys.stdout.write(f"rank error: {error}\n")
            sys.stdout.flush()
            os._exit(EXIT_FATAL if isinstance(error, DeviceMemoryError) else EXIT_RESTART)
    os._exit(0)  # gloo's threads may abort a process that takes itself apart
