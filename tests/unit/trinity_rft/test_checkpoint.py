"""Checkpoints in the layout of Trinity-RFT become models: the weights are those that were stored, and nothing runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from trinity_mq.cli.main import main
from trinity_mq.config import ModelConfig
from trinity_mq.models import ModelError, ensure_model_folder
from trinity_mq.models.model_folder import no_progress_bar

SIZES = {
    "vocab_size": 33, "hidden_size": 10, "intermediate_size": 7, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip


def made(folder: Path, dtype: torch.dtype = torch.float32, *, experts: bool = False, tied: bool = False) -> Any:
    """Return a model, whose configuration and tokenizer files are written to a folder."""
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if experts else {}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(**SIZES, **more, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return model


def sharded(weights: Mapping[str, Tensor], folder: Path, world: int, copies: int = 1) -> None:
    """Write a file per rank, with the real class of torch, as FSDP2 does: divided on dimension 0, also unevenly."""
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            size = world // copies
            mesh = (
                init_device_mesh("cpu", (copies, size), mesh_dim_names=("ddp", "fsdp"))
                if copies > 1
                else init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
            )
            placements = [Replicate(), Shard(0)] if copies > 1 else [Shard(0)]
            state = {}
            for name, weight in weights.items():
                chunks = weight.chunk(size)
                number = rank % size
                part = chunks[number] if number < len(chunks) else weight[:0]
                shape: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
                state[name] = DTensor.from_local(part.clone(), mesh, placements, run_check=False, **shape)
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def loaded(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a model folder."""
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    state: dict[str, Tensor] = model.state_dict()
    return state


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """The folder of the policy of step 40, with the files of a full checkpoint next to it."""
    folder = tmp_path / "run" / "global_step_40" / "actor"
    (folder / "huggingface").mkdir(parents=True)
    (tmp_path / "run" / "global_step_9").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("40")
    (folder / "fsdp_config.json").write_text("{}")
    return folder


def convert(checkpoint: Path, out: Path, *more: str) -> int:
    return main(["convert-checkpoint", str(checkpoint), "--out", str(out), *more])


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_of_ranks_become_the_model(
    actor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], world: int, copies: int, dtype: torch.dtype
) -> None:
    model = made(actor / "huggingface", dtype, tied=world == 1)
    sharded(model.state_dict(), actor, world, copies)
    out = tmp_path / "first"

    assert convert(tmp_path / "run", out) == 0

    assert f"model.model_path={out}" in capsys.readouterr().out
    assert same(loaded(out), model.state_dict())
    assert (out / "chat_template.jinja").is_file()
    assert ensure_model_folder(ModelConfig(model_path=str(out)), tmp_path / "unused", 0) == out


@pytest.mark.parametrize("experts", [False, True])
def test_the_file_of_a_weight_sync_becomes_the_model(actor: Path, tmp_path: Path, experts: bool) -> None:
    model = made(tmp_path / "base", torch.bfloat16, experts=experts)
    (actor / "huggingface").rmdir()
    save_file(dict(model.state_dict()), actor / "model.safetensors")

    assert convert(actor.parent, tmp_path / "none") == 2, "it has no configuration of its own"
    assert convert(actor.parent, tmp_path / "new", "--model", str(tmp_path / "base")) == 0

    assert same(loaded(tmp_path / "new"), model.state_dict())
    if experts:  # the names that engines know
        index = (tmp_path / "new" / "model.safetensors").read_bytes()[:4000]
        assert b"mlp.experts.3.gate_proj.weight" in index


def test_it_needs_no_package_that_is_not_installed_with_ours(
    actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of the tests has accelerate, which a user's lacks."""
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda *_: False)
    sharded(made(actor / "huggingface").state_dict(), actor, 1)
    assert convert(actor, tmp_path / "new") == 0


@pytest.mark.parametrize("place", ["", "huggingface"])
@pytest.mark.parametrize("shard_size", ["1GB", "2KB"])
def test_an_exported_model_is_taken_as_it_is(actor: Path, tmp_path: Path, place: str, shard_size: str) -> None:
    model = made(actor / "huggingface")
    with no_progress_bar():
        model.save_pretrained(actor / "huggingface", max_shard_size=shard_size)

    assert convert(actor / place, tmp_path / "new") == 0
    assert same(loaded(tmp_path / "new"), model.state_dict())
    folder = actor / "huggingface"
    assert ensure_model_folder(ModelConfig(model_path=str(folder)), tmp_path, 0) == folder, "without the command too"


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_are_merged(actor: Path, tmp_path: Path, rslora: bool) -> None:
    model = made(actor / "huggingface")
    adapted = "model.layers.1.self_attn.q_proj"
    low, high = torch.randn(4, 10), torch.randn(12, 4)
    state = {
        f"base_model.model.{name.replace(adapted, adapted + '.base_layer')}": weight
        for name, weight in model.state_dict().items()
    }
    state |= {
        f"base_model.model.{adapted}.lora_{side}.default.weight": value for side, value in (("A", low), ("B", high))
    }
    sharded(state, actor, 2)
    (actor / "lora_adapter").mkdir()
    settings = {"r": 4, "lora_alpha": 6, "use_rslora": rslora, "rank_pattern": {}, "use_dora": False}
    (actor / "lora_adapter" / "adapter_config.json").write_text(json.dumps(settings))

    assert convert(actor, tmp_path / "new") == 0

    expected = dict(model.state_dict())
    expected[f"{adapted}.weight"] = expected[f"{adapted}.weight"] + (3.0 if rslora else 1.5) * (high @ low)
    new = loaded(tmp_path / "new")
    assert new.keys() == expected.keys()
    assert all(torch.allclose(new[name], expected[name], atol=1e-6) for name in expected)


class Hostile:
    """A pickle that makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_file_that_would_execute_something_is_refused(
    actor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(actor / "huggingface")
    torch.save({"a": torch.ones(1), "b": Hostile(tmp_path / "executed")}, actor / "model_world_size_1_rank_0.pt")
    assert convert(actor, tmp_path / "new") == 2
    assert re.search(r"refers to (posix|os|nt)\.mkdir, .*no code was executed", capsys.readouterr().err)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()


def broken(actor: Path, how: str) -> None:
    weights = made(actor / "huggingface").state_dict()
    match how:
        case "a rank is missing":
            sharded(weights, actor, 3)
            (actor / "model_world_size_3_rank_1.pt").unlink()
        case "two runs":
            for world in (1, 2):
                sharded(weights, actor, world)
        case "cut short":
            sharded(weights, actor, 2)
            path = actor / "model_world_size_2_rank_1.pt"
            path.write_bytes(path.read_bytes()[:-200])
        case "a weight is missing":
            sharded({name: weights[name] for name in list(weights)[1:]}, actor, 1)
        case "another weight":
            sharded({**weights, "value_head.weight": torch.ones(2)}, actor, 1)
        case "another shape":
            sharded({**weights, "model.norm.weight": torch.ones(2)}, actor, 1)
        case "a weight sync with adapters":
            save_file(dict(weights), actor / "model.safetensors")
            (actor / "lora_adapter").mkdir()
            (actor / "lora_adapter" / "adapter_config.json").write_text("{}")
        case "Megatron":
            (actor / "dist_ckpt").mkdir()
        case "nothing":
            pass


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a rank is missing", "lacks the files of 1 of 3 ranks, first of rank 1"),
        ("two runs", r"files of \[1, 2\] ranks"),
        ("cut short", "rank_1.pt is damaged"),
        ("a weight is missing", "1 are missing, first model.embed_tokens.weight"),
        ("another weight", "1 are unexpected, first value_head.weight"),
        ("another shape", "model.norm.weight"),
        ("a weight sync with adapters", "may be merged or not; convert a full checkpoint"),
        ("Megatron", "checkpoint of Megatron.*trinity convert --checkpoint-dir"),
        ("nothing", "has no weights of Trinity-RFT; wanted the checkpoint folder of a run"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    actor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    broken(actor, how)
    assert convert(actor, tmp_path / "new") == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("latest", ["40", None])
def test_a_step_that_was_cut_off_while_it_was_saved_is_skipped(actor: Path, tmp_path: Path, latest: str | None) -> None:
    model = made(actor / "huggingface")
    sharded(model.state_dict(), actor, 1)
    (cut_off := tmp_path / "run" / "global_step_50" / "actor").mkdir(parents=True)
    (cut_off / "model_world_size_2_rank_0.pt").touch()
    if latest is None:
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()

    assert convert(tmp_path / "run", tmp_path / "new") == 0
    assert same(loaded(tmp_path / "new"), model.state_dict())


def test_an_existing_folder_is_kept(actor: Path, tmp_path: Path) -> None:
    assert convert(actor, tmp_path) == 2
    assert actor.is_dir()


@pytest.mark.parametrize("place", ["run", "run/global_step_40", "run/global_step_40/actor/huggingface"])
def test_a_checkpoint_as_model_path_names_the_command(actor: Path, tmp_path: Path, place: str) -> None:
    sharded(made(actor / "huggingface").state_dict(), actor, 1)
    with pytest.raises(ModelError, match=r"trinity-mq convert-checkpoint .* --out NEW_FOLDER"):
        ensure_model_folder(ModelConfig(model_path=str(tmp_path / place)), tmp_path / "unused", 0)


def test_a_weight_that_its_file_does_not_hold_is_refused(
    actor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(actor / "huggingface")
    for tensor in (torch.zeros(1).expand(10**7, 10**7), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()):
        torch.save({"w": tensor}, actor / "model_world_size_1_rank_0.pt")
        assert convert(actor, tmp_path / "out") == 2
        assert "w is not stored with all of its values" in capsys.readouterr().err
    assert list(tmp_path.glob(".out*")) == []


@pytest.mark.parametrize(
    ("placement", "shape", "device", "words"),
    [
        (Shard(9), (2, 3), "cpu", "divided on a dimension that it does not have"),
        (Shard(0), (2, 4), "cpu", "has shape (2, 3), and a part of it (2, 4)"),
        (Shard(0), (2,), "cpu", "has shape (2, 3), and a part of it (2,)"),
        (Shard(0), (2, 3), "meta", "is not stored with all of its values"),
    ],
)
def test_shards_that_do_not_fit_are_refused(
    actor: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    placement: Shard,
    shape: tuple[int, ...],
    device: str,
    words: str,
) -> None:
    made(actor / "huggingface")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        whole: dict[str, Any] = {"shape": torch.Size((2, 3)), "stride": (3, 1)}
        part = torch.zeros(shape, device=device)
        stored = DTensor.from_local(part, mesh, [placement], run_check=False, **whole)
        torch.save({"w": stored}, actor / "model_world_size_1_rank_0.pt")
    finally:
        dist.destroy_process_group()

    assert convert(actor, tmp_path / "out") == 2

    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "settings", "words"),
    [
        ((4, 10), (12, 5), {"r": 4, "lora_alpha": 6}, "has shapes [4, 10] and [12, 5], and the weight [12, 10]"),
        ((4, 10), (12, 4), {"r": math.inf, "lora_alpha": 6}, "cannot be read"),
        ((4, 10), (12, 4), {"r": 4, "lora_alpha": math.nan}, "lora_alpha to nan, which this command does not merge"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    actor: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    low: tuple[int, int],
    high: tuple[int, int],
    settings: dict[str, Any],
    words: str,
) -> None:
    state = dict(made(actor / "huggingface").state_dict())
    layer = "model.layers.1.self_attn.q_proj"
    state |= {f"{layer}.lora_A.weight": torch.ones(low), f"{layer}.lora_B.weight": torch.ones(high)}
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    (actor / "lora_adapter").mkdir()
    (actor / "lora_adapter" / "adapter_config.json").write_text(json.dumps(settings))
    assert convert(actor, tmp_path / "out") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"num_attention_heads": {}}, {"head_dim": -1}, {"model_type": []}, {"dtype": {}}])
def test_a_configuration_that_describes_no_model_is_refused(
    actor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    save_file(dict(made(actor / "huggingface").state_dict()), actor / "model.safetensors")
    path = actor / "huggingface" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    assert convert(actor, tmp_path / "out") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
