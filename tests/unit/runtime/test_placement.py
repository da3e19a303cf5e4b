"""The GPUs of each process: from what ``nvidia-smi`` prints and what the environment hides, to the environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import Config, load_config
from trinity_mq.engines.host.host import auxiliary_hosts, rollout_hosts
from trinity_mq.engines.host.ready_file import ReadyFile, free_gpus, write_ready
from trinity_mq.runtime.gpu_memory import SHARED_VARIABLE
from trinity_mq.runtime.gpus import Gpu, unmasked, visible_devices, visible_gpus
from trinity_mq.runtime.placement import (
    PLACED_VARIABLE,
    Placement,
    PlacementError,
    gpu_needs,
    place,
    place_engines,
    place_run,
    place_trainer,
    trainer_environment,
)

TINY = {"tiny": {}, "max_model_len": 32, "max_prompt_tokens": 16, "max_response_tokens": 8}
RECORDS = {"trainer_input": {"experience_buffer": {"schema_type": "sft", "storage_type": "file", "path": "x.jsonl"}}}
SFT = {"algorithm": {"algorithm_type": "sft"}, "buffer": RECORDS}
GIB = 2**30
EXAMPLES = Path(__file__).parents[3] / "examples"


def configured(
    nproc: int = 1, engines: int = 1, size: int = 1, aux: dict[str, Any] | None = None, **sections: Any
) -> Config:
    """Return a run with ``nproc`` trainer processes, ``engines`` of ``size`` GPUs and auxiliary models, whose value is
    their number of engines or their section.
    """
    models = [
        {"name": name, **(value if isinstance(value, dict) else {"engine_num": value, "model": TINY})}
        for name, value in (aux or {}).items()
    ]
    rollout = {"engine_num": engines, "tensor_parallel_size": size, "engine": "vllm" if size > 1 else "transformers"}
    explorer = {"rollout_model": rollout, "auxiliary_models": models}
    return load_config({"model": TINY, "trainer": {"nproc": nproc}, "explorer": explorer, **sections})


def gpus(count: int, **fields: Any) -> list[Gpu]:
    return [Gpu(entry=str(number), **fields) for number in range(count)]


def shown(placement: Placement) -> str:
    """Return the GPUs of the trainer, of each engine and of each auxiliary engine, such as ``0,1 | 2 | 3 | 3``."""
    return " | ".join(placement.entries(need.name) for need in placement.needs)


PLACED: dict[str, tuple[int, Config, str]] = {
    "one GPU is shared": (1, configured(), "0 | 0"),
    "one GPU is shared by all engines": (1, configured(engines=3, aux={"judge": 1}), "0 | 0 | 0 | 0 | 0"),
    "two GPUs": (2, configured(), "0 | 1"),
    "two engines beside one process": (3, configured(engines=2), "0 | 1 | 2"),
    "eight GPUs, four and four": (8, configured(4, 4), "0,1,2,3 | 4 | 5 | 6 | 7"),
    "tensor parallel engines": (8, configured(4, 2, 2), "0,1,2,3 | 4,5 | 6,7"),
    "GPUs that are left stay empty": (8, configured(2, 2), "0,1 | 2 | 3"),
    "auxiliary models take what is left": (
        8,
        configured(2, 2, aux={"a": 2, "b": 3}),
        "0,1 | 2 | 3 | 4 | 5 | 6 | 7 | 4",
    ),
    "auxiliary models share what is left": (4, configured(2, 1, aux={"a": 3}), "0,1 | 2 | 3 | 3 | 3"),
    "auxiliary models share with engines": (3, configured(1, 2, aux={"a": 3}), "0 | 1 | 2 | 1 | 2 | 1"),
    "an external auxiliary model": (
        2,
        configured(aux={"far": {"engine": "external", "url": "http://h/v1"}}),
        "0 | 1",
    ),
    "an auxiliary model on the CPU": (2, configured(aux={"a": {"model": {**TINY, "device": "cpu"}}}), "0 | 1"),
    "device cpu": (8, configured(4, 4, model={**TINY, "device": "cpu"}), ""),
    "only the auxiliary model has a GPU": (8, configured(aux={"a": 1}, model={**TINY, "device": "cpu"}), "0"),
    "no GPU": (0, configured(4, 4), " |  |  |  | "),
    "mode train": (8, configured(2, 4, mode="train", **SFT), "0,1"),
    "mode explore": (2, configured(mode="explore"), "0 | 1"),
    "mode serve": (2, configured(mode="serve"), "0 | 1"),
    "named": (4, configured(2, 1, devices={"trainer": [3, 1], "engines": [[0]]}), "3,1 | 0"),
    "the rest is automatic": (8, configured(1, 3, devices={"trainer": [7]}), "7 | 0 | 1 | 2"),
    "named to share": (2, configured(1, 2, devices={"trainer": [0], "engines": [[1], [0]]}), "0 | 1 | 0"),
    "a named auxiliary model": (3, configured(aux={"a": 1}, devices={"auxiliary": {"a": [[0]]}}), "1 | 2 | 0"),
    "nccl": (5, configured(1, 4, synchronizer={"backend": "nccl"}), "0 | 1 | 2 | 3 | 4"),
}


@pytest.mark.parametrize("name", PLACED)
def test_trainer_and_engines_get_their_gpus(name: str) -> None:
    count, config, expected = PLACED[name]
    assert shown(place_run(config, gpus(count))) == expected


NCCL = {"synchronizer": {"backend": "nccl"}}
REFUSED: dict[str, tuple[int, Config, list[str]]] = {
    "between": (
        2,
        configured(1, 2),
        ["1 rank and 2 engines of 1 GPU need 3 GPUs apart, 2 are here: set explorer.rollout_model.engine_num=1, or"],
    ),
    "five": (5, configured(4, 4), ["need 8 GPUs apart, 5 are here", "engine_num=1, or trainer.nproc=1, or 'devices={"]),
    "five, nccl": (5, configured(4, 4, **NCCL), ["need 8 GPUs apart, 5 are here", "or trainer.nproc=1"]),
    "tensor parallel": (8, configured(4, 4, 2), ["4 engines of 2 GPUs need 12 GPUs apart", "engine_num=2, or"]),
    "eight of both": (
        8,
        configured(8, 8),
        [
            "set trainer.nproc=4 explorer.rollout_model.engine_num=4, or 'devices={trainer: [0, 1, 2, 3, 4, 5, 6, 7]",
            "; `trinity-mq node` runs them on several machines",
        ],
    ),
    "one for two processes": (1, configured(2), ["need 3 GPUs apart, 1 is here: set trainer.nproc=1"]),
    "one for a large engine": (1, configured(1, 1, 2), ["set explorer.rollout_model.tensor_parallel_size=1"]),
    "only ranks": (
        2,
        configured(4, mode="train", **SFT),
        ["4 ranks need 4 GPUs apart, 2 are here: set trainer.nproc=2"],
    ),
    "nccl on one": (1, configured(**NCCL), ["a separate GPU for trainer rank 0", "set synchronizer.sync_method=coll"]),
    "nccl, named": (2, configured(devices={"trainer": [1], "engines": [[1]]}, **NCCL), ["2 in all, and they share 1"]),
    "no such GPU": (2, configured(devices={"trainer": [2]}), ["devices.trainer names GPU 2", "visible here are: 0, 1"]),
    "nothing to name": (0, configured(devices={"engines": [[0]]}), ["visible here are: none"]),
    "too few are left": (2, configured(1, 2, devices={"trainer": [0]}), ["1 is left besides", "set explorer.rollout"]),
    "auxiliary model": (
        2,
        configured(aux={"a": {"engine": "vllm", "tensor_parallel_size": 4, "model": TINY}}),
        ["auxiliary model 'a' has tensor_parallel_size 4, and 2 GPUs"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_misfit_says_what_fits(name: str) -> None:
    count, config, words = REFUSED[name]
    with pytest.raises(PlacementError) as caught:
        place_run(config, gpus(count))
    assert [part for part in words if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("name", ["between", "five", "five, nccl", "tensor parallel", "eight of both", "only ranks"])
def test_what_a_misfit_proposes_fits(name: str) -> None:
    count, config, _ = REFUSED[name]
    with pytest.raises(PlacementError) as caught:
        place_run(config, gpus(count))
    proposals = (
        str(caught.value).partition(": set ")[2].partition(";")[0].removesuffix(", which shares GPUs").split(", or ")
    )
    assert proposals
    for proposal in proposals:
        words = [proposal.strip("'")] if "devices=" in proposal else proposal.split()
        place_run(load_config(config.model_dump(mode="json"), words), gpus(count))


@pytest.mark.parametrize("chosen", [{"backend": "nccl"}, {"sync_method": "nccl"}], ids=str)
def test_what_replaces_nccl_fits_whichever_key_chose_it(chosen: dict[str, str]) -> None:
    config = {"model": TINY, "synchronizer": chosen}
    with pytest.raises(PlacementError) as caught:
        place_run(load_config(config), gpus(1))
    words = str(caught.value).partition(": set ")[2].partition(",")[0].split()
    assert shown(place_run(load_config(config, words), gpus(1))) == "0 | 0"


def test_the_examples_fit_on_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "GSM8K", "RUNS"):
        monkeypatch.setenv(f"TRINITY_MQ_{name}", "/data")
    configs = {name: load_config(EXAMPLES / f"gpu-{name}.yaml") for name in ("24gb", "two", "eight", "nodes")}
    assert shown(place_run(configs["24gb"], gpus(1))) == "0 | 0"
    assert shown(place_run(configs["two"], gpus(2))) == "0 | 1"
    assert shown(place_run(configs["eight"], gpus(8))) == "0,1,2,3 | 4 | 5 | 6 | 7"
    assert shown(place_trainer(configs["nodes"], gpus(8))) == "0,1,2,3,4,5,6,7"
    engines = place_engines(configs["nodes"], gpus(8))
    assert sorted(shown(engines)) == sorted("0 | 1 | 2 | 3 | 4 | 5 | 6 | 7")
    assert not any(engines.shares(need.name) for need in engines.needs)
    rollout = configs["nodes"].explorer.rollout_model
    assert rollout.vllm.gpu_memory_utilization == 0.9, (
        "without a supervisor that knows the whole machine it would be 0.5"
    )


def test_gpus_that_others_fill_are_not_used_unless_they_are_named_or_all_are_filled() -> None:
    here = gpus(4, total=80 * GIB, free=79 * GIB)
    here[1] = Gpu(entry="1", total=80 * GIB, free=10 * GIB)
    assert shown(place_run(configured(), here)) == "0 | 2"
    assert shown(place_run(configured(devices={"trainer": [1]}), here)) == "1 | 0"
    with pytest.raises(
        PlacementError, match=r"need 4 GPUs apart, 3 are here, besides GPU 1, which other processes fill"
    ):
        place_run(configured(2, 2), here)
    assert shown(place_run(configured(), gpus(2, total=80 * GIB, free=10 * GIB))) == "0 | 1"


def test_a_process_sees_one_mig_slice_only() -> None:
    slices = [Gpu(entry=f"MIG-{name}", uuid=f"MIG-{name}") for name in "ab"]
    assert shown(place_run(configured(), slices)) == "MIG-a | MIG-b"
    with pytest.raises(PlacementError, match=r"only one MIG slice: set trainer\.nproc to 1"):
        place_run(configured(2, mode="train", **SFT), slices)


def test_uuids_name_gpus() -> None:
    here = [Gpu(entry=str(number), uuid=f"GPU-{name}") for number, name in enumerate("abc")]
    named = configured(devices={"trainer": ["GPU-c"], "engines": [["GPU-a"]]})
    assert shown(place_run(named, here)) == "2 | 0", "as entries of what the environment shows"


TABLE = """\
GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, NVIDIA H100 80GB HBM3, 81559, 81008, Disabled
GPU-0a1b, NVIDIA A100-SXM4-40GB, 40960, 40000, Enabled
GPU-77, NVIDIA GB10, [N/A], [N/A], [N/A]
"""
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-0a1b)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4)
  MIG 1g.5gb      Device  1: (UUID: MIG-77d4)
GPU 2: NVIDIA GB10 (UUID: GPU-77)
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of ``nvidia-smi`` that prints the texts above."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "table").write_text(TABLE)
    (folder / "listing").write_text(LISTING)
    program = folder / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ -e "${0%/*}/broken" ] && { echo "no driver"; exit 9; }\n'
        'case "$1" in -L) exec cat "${0%/*}/listing";; *) exec cat "${0%/*}/table";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def test_what_nvidia_smi_prints(nvidia_smi: Path) -> None:
    report = visible_gpus({})
    first, *slices, last = report.gpus
    assert first == Gpu(
        entry="0",
        uuid="GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77",
        name="NVIDIA H100 80GB HBM3",
        total=81559 * 2**20,
        free=81008 * 2**20,
    )
    assert [(gpu.entry, gpu.total, gpu.free) for gpu in slices] == [
        ("MIG-c6d4f1ef-42e4", 20 * GIB, None),
        ("MIG-77d4", 5 * GIB, None),
    ]
    assert (last.entry, last.total, last.free) == ("2", None, None)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}).why == "nvidia-smi lists 4 GPUs, CUDA_VISIBLE_DEVICES is ''"
    (nvidia_smi / "broken").touch()
    report = visible_gpus({})
    assert (report.gpus, report.why) == ([], "nvidia-smi fails: no driver")


@pytest.mark.parametrize("output", [b"No devices were found", b"\xff\xfe\x00", b"GPU-1, card, 80, 80, [N/A]\nwarning"])
def test_output_without_gpus_is_quoted(nvidia_smi: Path, output: bytes) -> None:
    (nvidia_smi / "output").write_bytes(output)
    (nvidia_smi / "nvidia-smi").write_text(f"#!/bin/sh\ncat {nvidia_smi}/output\n")
    report = visible_gpus({})
    assert report.gpus == []
    assert report.why.endswith(", wanted the UUID of a GPU and its memory")


def test_absurd_numbers_are_refused_at_once() -> None:
    with pytest.raises(PlacementError, match=r"set trainer\.nproc=4 explorer\.rollout_model\.engine_num=4"):
        place_run(configured(4096, 4096), gpus(8))


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (None, ["0", "MIG-c6d4f1ef-42e4", "MIG-77d4", "2"]),
        ("", []),
        ("2, 0", ["2", "0"]),
        ("2,5,0", ["2"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-5d5b", ["GPU-5d5b"]),
        ("MIG-77d4,0", ["MIG-77d4", "0"]),
        ("GPU-", []),
        ("0,,2", ["0"]),
        ("0,2,0", []),
        ("0,GPU-5d5b", []),
        ("0" * 5000, []),
    ],
)
def test_the_environment_hides_gpus_as_in_cuda(nvidia_smi: Path, mask: str | None, entries: list[str]) -> None:
    report = visible_gpus({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [gpu.entry for gpu in report.gpus] == entries


def test_pretended_gpus_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TRINITY_MQ_PRETEND_GPUS": "3", "CUDA_VISIBLE_DEVICES": "1,2"}
    assert [gpu.entry for gpu in visible_gpus(environment).gpus] == ["1", "2"]
    assert shown(place_run(configured(), visible_gpus(environment).gpus)) == "1 | 2", "entries of the outer value"
    for value in ("many", "-1", "99999999999"):
        report = visible_gpus({"TRINITY_MQ_PRETEND_GPUS": value})
        expected = f"TRINITY_MQ_PRETEND_GPUS is {value!r}, wanted a number from 0 to 1024"
        assert (report.gpus, report.why) == ([], expected)
    assert unmasked([gpus(1)], "0") == gpus(1)


def test_each_process_reports_its_gpus() -> None:
    assert visible_devices({}) is None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3,GPU-a"}) == ["3", "GPU-a"]


def test_without_gpus_the_environment_stays_and_on_the_cpu_all_are_hidden() -> None:
    assert place_run(configured(), []).environment("trainer-0") == {}
    hidden = place_run(configured(model={**TINY, "device": "cpu"}), gpus(2))
    assert hidden.agent_environment("trainer-0")["CUDA_VISIBLE_DEVICES"] == ""
    agents = place_run(configured(2), gpus(4))
    assert agents.agent_environment("trainer-0") == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        PLACED_VARIABLE: '{"explorer-0-engine": {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}',
    }
    assert not agents.environment("explorer-0-engine").keys() & {SHARED_VARIABLE}
    assert place_run(configured(), gpus(1)).environment("explorer-0-engine")[SHARED_VARIABLE] == "1"
    for role in ("explorer-0", "runner-3", "operator-0", "gateway-0"):
        assert agents.agent_environment(role)["CUDA_VISIBLE_DEVICES"] == ""


def test_agents_that_are_started_by_hand_place_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MQ_PRETEND_GPUS", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = configured(2, 2, aux={"judge": 1})
    assert trainer_environment(config, "trainer-0")["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environments(config) == ["7", "6", "5"], "the last, since a trainer takes the first"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert trainer_environment(config, "trainer-0")["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert [host.environment["CUDA_VISIBLE_DEVICES"] for host in rollout_hosts(config, "engines-b")] == ["6", "5"]
    with pytest.raises(PlacementError, match="4 engines of 1 GPU need 4 GPUs apart, 3 are here: set explorer"):
        rollout_hosts(configured(1, 4), "engines-b")
    placed = {f"explorer-0-engine{end}": {"CUDA_VISIBLE_DEVICES": gpu} for end, gpu in (("", "0"), ("-1", "3"))}
    monkeypatch.setenv(PLACED_VARIABLE, json.dumps(placed))
    assert environments(config) == ["0", "3", ""], "as the supervisor says"
    assert trainer_environment(config, "trainer-0") == {}, "its supervisor has set it"


def environments(config: Config) -> list[str]:
    hosts = [*rollout_hosts(config, "explorer-0"), *auxiliary_hosts(config, "explorer-0")]
    return [host.environment["CUDA_VISIBLE_DEVICES"] for host in hosts]


def test_engines_of_an_earlier_start_do_not_count_as_filling_their_gpus(nvidia_smi: Path, tmp_path: Path) -> None:
    (nvidia_smi / "table").write_text("GPU-a, A, 80000, 9000, Disabled\nGPU-b, A, 80000, 80000, Disabled\n")
    assert [gpu.is_taken for gpu in free_gpus(tmp_path).gpus] == [True, False]
    (tmp_path / "engines").mkdir()
    fields = dict.fromkeys(ReadyFile.__dataclass_fields__.keys() - {"pid", "create_time"}, "x")
    write_ready(tmp_path / "engines" / "explorer-0-engine.ready.json", None, **fields)
    assert [gpu.is_taken for gpu in free_gpus(tmp_path).gpus] == [False, False]


def test_only_a_trainer_or_only_engines_are_placed_as_asked() -> None:
    config = configured(2, 2)
    engines = gpu_needs(config, trainer=None, explorer="e", auxiliary=False)
    assert shown(place(engines, gpus(2))) == "0 | 1"
    assert shown(place(gpu_needs(config, trainer="t", explorer=None), gpus(2))) == "0,1"


def test_trainer_and_engines_that_take_turns_have_the_same_gpus() -> None:
    needs = gpu_needs(configured(1, 2, aux={"judge": 1}), trainer="trainer-0", explorer="explorer-0")
    assert shown(place(needs, gpus(8), colocated=True)) == "0 | 0 | 0 | 1"
    assert shown(place(needs, gpus(1), colocated=True)) == "0 | 0 | 0 | 0"
    large = gpu_needs(configured(1, 1, 2), trainer="trainer-0", explorer="explorer-0")
    assert shown(place(large, gpus(2), colocated=True)) == "0 | 0,1"
    with pytest.raises(PlacementError, match="backend is nccl"):
        place(needs, gpus(8), colocated=True, nccl=True)
