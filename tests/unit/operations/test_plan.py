"""The plan of a run on GPUs: which memory it needs where, and what it says if that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.cli.main import main
from trinity_mq.config import Config, load_config
from trinity_mq.operations.plan import PlannedGpu, PlannedProcess, RunPlan
from trinity_mq.runtime.gpus import Gpu
from trinity_mq.runtime.placement import place_run
from trinity_mq.training.memory.estimate import MemoryEstimate

SMOKE = str(Path(__file__).parents[3] / "examples" / "smoke.yaml")
GIB = 2**30
TINY = {"tiny": {}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 8}
VLLM = {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}
TRAINER = {"weights": 10 * GIB, "activations": 4 * GIB}


def estimated(engine: dict[str, int | None], **auxiliary: dict[str, int | None]) -> MemoryEstimate:
    """Return the estimate of a trainer of 14 GiB with these engines."""
    return MemoryEstimate("cuda", 8192, trainer=TRAINER, trainer_host={}, engine=engine, auxiliary=auxiliary)


def planned(estimate: MemoryEstimate | None, *gpus: tuple[int, int], **explorer: Any) -> RunPlan:
    """Return the plan on GPUs of these total and free GiB."""
    config: Config = load_config({"model": TINY, "explorer": explorer})
    devices = [Gpu(entry=str(number), total=total * GIB, free=free * GIB) for number, (total, free) in enumerate(gpus)]
    return RunPlan(config, place_run(config, devices), estimate)


def left(plan: RunPlan) -> list[int | None]:
    return [None if gpu.left is None else gpu.left // GIB for gpu in plan.gpus]


def test_vllm_takes_its_share_and_others_take_their_parts() -> None:
    weights: dict[str, int | None] = {"weights": 2 * GIB, "cache": None}
    plan = planned(estimated(weights), (80, 80), (80, 80), (80, 80), rollout_model=VLLM)
    assert (left(plan), plan.problems) == ([66, 40, 80], [])
    judge = {"auxiliary_models": [{"name": "judge", "model": TINY}]}
    plan = planned(estimated(weights, judge={"weights": 3 * GIB}), (80, 80), (80, 70), rollout_model=VLLM, **judge)
    assert left(plan) == [66, 27], "others use 10 of the second"
    assert "not used: GPU 2" not in "\n".join(plan.lines())


def test_a_shortage_names_the_processes_and_what_helps() -> None:
    plan = planned(estimated({"weights": 2 * GIB}), (24, 22), rollout_model=VLLM)
    (problem,) = plan.problems
    assert problem.startswith(
        "GPU 0 has 22 GiB that other processes leave of 24 GiB, and an estimated 4 GiB more are needed (trainer-0 14 "
        "GiB, explorer-0-engine 12 GiB): try "
    )
    assert "a smaller trainer.max_tokens_per_micro_batch" in problem
    assert "a smaller gpu_memory_utilization" in problem
    assert left(plan) == [-4]
    assert not plan.as_json()["fits"]


def test_a_model_needs_room_within_the_share_of_its_engine() -> None:
    plan = planned(estimated({"weights": 30 * GIB, "cache": None}), (80, 80), (40, 40), rollout_model=VLLM)
    (problem,) = plan.problems
    assert "explorer-0-engine gets 20 GiB of GPU 1 by gpu_memory_utilization, and needs an estimated 30 GiB" in problem
    plan = planned(estimated({"weights": 13 * GIB, "cache": None}), (24, 24), rollout_model=VLLM)
    assert len(plan.problems) == 2
    assert "a smaller gpu_memory_utilization" not in "".join(plan.problems), "its engine needs more"


def test_of_processes_that_take_turns_the_larger_side_counts() -> None:
    sizes = {"trainer": 14, "engine": 12, "auxiliary": 3}
    processes = [
        PlannedProcess(name=kind, kind=kind, gpu=0, parts={"weights": gib * GIB}, least=gib * GIB)
        for kind, gib in sizes.items()
    ]
    card = Gpu(entry="0", total=24 * GIB)
    together = PlannedGpu(number=0, gpu=card, processes=processes)
    turns = PlannedGpu(number=0, gpu=card, processes=processes, takes_turns=True)
    assert (together.left, together.missing) == (-5 * GIB, 5 * GIB)
    assert (turns.left, turns.missing) == (7 * GIB, 0)


def test_upper_bounds_are_remarks_and_unknown_memory_is_no_problem() -> None:
    engine: dict[str, int | None] = {"weights": GIB, "cache": 12 * GIB, "logits": GIB}
    plan = planned(estimated(engine), (24, 24))
    assert (plan.problems, left(plan)) == ([], [-4])
    assert "GPU 0 is too small if its engines get as many and as long requests as they accept" in plan.lines()
    unknown = MemoryEstimate("cuda", 8192, unknown={"model": "it is not downloaded"})
    plan = planned(unknown, (24, 24))
    assert (plan.problems, left(plan)) == ([], [None])
    assert "the memory of model is unknown: it is not downloaded" in plan.lines()


def test_each_rank_and_worker_has_a_row() -> None:
    config = load_config(
        {
            "model": TINY,
            "trainer": {"nproc": 2},
            "explorer": {"rollout_model": {**VLLM, "tensor_parallel_size": 2}},
        }
    )
    plan = RunPlan(config, place_run(config, [Gpu(entry=f"GPU-{name}") for name in "abcd"]))
    assert [(process.name, process.gpu) for process in plan.processes] == [
        ("trainer-0 rank 0", 0),
        ("trainer-0 rank 1", 1),
        ("explorer-0-engine worker 0", 2),
        ("explorer-0-engine worker 1", 3),
    ]
    environment = plan.as_json()["environment"]
    assert environment["trainer-0"]["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


@pytest.mark.timeout(300)
def test_the_command_tells_programs_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SMOKE, "--gpus", "1", "--gpu-memory", "1.5", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [(row["process"], row["gpu"]) for row in report["processes"]] == [("trainer-0", 0), ("explorer-0-engine", 0)]
    (gpu,) = report["gpus"]
    assert (gpu["total"], gpu["left"] < 0) == (1.5 * GIB, True)
    assert gpu["left"] == gpu["free"] - sum(row["estimate"] for row in report["processes"])
    (problem,) = report["problems"]
    assert problem.startswith("GPU 0 has 1.5 GiB, and an estimated ")


def test_the_command_without_room_or_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_MQ_PRETEND_GPUS", "0")
    assert main(["plan", SMOKE]) == 0
    assert capsys.readouterr().out.startswith("no GPU can be used here")
    assert main(["plan", SMOKE, "model.device=cuda"]) == 1
    assert main(["plan", SMOKE, "synchronizer.backend=nccl"]) == 1
    assert main(["plan", SMOKE, "--gpus", "5", "trainer.nproc=4", "explorer.rollout_model.engine_num=4"]) == 1
    out, _ = capsys.readouterr()
    assert "does not fit: 4 ranks and 4 engines of 1 GPU need 8 GPUs apart, 5 are here: set explorer." in out
    assert main(["plan", SMOKE, "--gpus", "2", "model.device=cpu"]) == 0
    assert "no process of this run computes on a GPU" in capsys.readouterr().out
    eight = [SMOKE, "trainer.nproc=8", "explorer.rollout_model.engine_num=8"]
    monkeypatch.setenv("TRINITY_MQ_PRETEND_GPUS", "8")
    assert main(["plan", *eight]) == 1
    assert "; `trinity-mq node` runs them on several machines" in capsys.readouterr().out
    for part, rows in (("trainer", "trainer-0 rank 7  7 "), ("engines", "explorer-0-engine-7  0 ")):
        assert main(["plan", *eight, "--only", part]) == 0
        out, err = capsys.readouterr()
        assert rows in out
        assert "next: trinity-mq run" not in err
        assert len(out.splitlines()) == 11, "title, head, eight rows, remark"
    assert main(["plan", SMOKE, "--gpu-memory", "80"]) == 2
    assert "give --gpus N too" in capsys.readouterr().err
    stages = tmp_path / "s.yaml"
    named = "  - {stage_name: a}\n  - {stage_name: b, trainer: {nproc: 2}}\n"
    stages.write_text(f"name: s\nmodel: {{tiny: {{}}, device: cpu}}\nstages:\n{named}")
    assert main(["plan", str(stages), "--gpus", "2", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["stages"]) == ["a", "b"]


@pytest.mark.parametrize(
    "words",
    ["--gpus 0", "--gpus many", "--gpus 99999999999", *(f"--gpus 2 --gpu-memory {x}" for x in ("-1", "nan", "inf"))],
)
def test_numbers_are_above_zero_and_finite(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", SMOKE, *words.split()])
    assert "error: argument --gpu" in capsys.readouterr().err
