"""LoRA against plain ``peft`` and transformers: training, merged weights, files, checkpoints and the reference."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.unit.training.test_composed_losses import rows
from tests.unit.training.test_learner import VOCABULARY, Opener, batch, config, make_model, plain_logprobs
from trinity_mq.config import Config, ModelConfig
from trinity_mq.config.model import LoraConfig
from trinity_mq.operations.validate import check_lora
from trinity_mq.training.checkpoints.state import read_parts
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.model.lora import AdapterError, Adapters, check_targets
from trinity_mq.training.packing import DivisionSettings, train_tokens

TOKENS = [2, 3, 4, 5, 6, 7]
HELD = {"kl": {"kind": "k2", "coef": 0.1}}


def with_lora(dtype: str = "float32", settings: Mapping[str, Any] | None = None, **lora: Any) -> Config:
    """Return settings of a run with adapters, whose loss needs a reference model."""
    data = config(lr=1e-2, dtype=dtype).model_dump(mode="json") | dict(settings or {})
    data["model"]["lora"] = {"r": 4, "alpha": 16, **lora}
    data["algorithm"] |= HELD
    return Config.model_validate(data)


def adapters_of(learner: TorchLearner) -> Adapters:
    found = learner.policy.adapters
    assert found is not None
    return found


async def trained(learner: TorchLearner, first: int = 1, last: int = 3) -> list[dict[str, float]]:
    return [await learner.step(rows("grpo", step), step) for step in range(first, last + 1)]


async def weights_of(learner: TorchLearner) -> dict[str, Tensor]:
    """Return what engines get, as a weight sync reads it: from another thread than the learner's."""

    def read(late: list[tuple[str, Any]]) -> dict[str, Tensor]:
        return {name: one.full_tensor().clone() for name, one in late}

    return await asyncio.to_thread(read, await learner.weights())


def logprobs_of(model: Any) -> Tensor:
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


async def test_adapters_begin_without_effect_and_are_all_that_is_trained(folder: Path, opened: Opener) -> None:
    learner = await opened(with_lora())
    policy, adapters = learner.policy, adapters_of(learner)
    assert await learner.canary_logprobs(TOKENS) == pytest.approx(logprobs_of(loaded(folder)).tolist(), abs=1e-6)
    first = {name: one.detach().clone() for name, one in policy.model.named_parameters()}
    assert len(adapters.layers) == 2 * 7, "every linear layer of two blocks"
    metrics = await trained(learner)
    assert all(one["actor/grad_norm"] > 0 and one["actor/update_norm"] > 0 for one in metrics)
    moved = {name for name, one in policy.model.named_parameters() if not torch.equal(one, first[name])}
    assert moved == set(adapters.parameters)
    assert {name for name, one in policy.model.named_parameters() if one.requires_grad} == moved


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
async def test_merged_weights_say_what_the_adapters_do(
    folder: Path, opened: Opener, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    learner = await opened(with_lora(dtype, rslora=True))
    await trained(learner, 1, 8)
    found = await learner.canary_logprobs(TOKENS)
    assert found != pytest.approx(logprobs_of(loaded(folder)).tolist(), abs=5 * tolerance), "training shows"
    await learner.export(tmp_path / "final")
    peft = PeftModel.from_pretrained(loaded(folder), tmp_path / "final" / "adapter")
    assert logprobs_of(loaded(tmp_path / "final")).tolist() == pytest.approx(found, abs=tolerance)
    assert logprobs_of(peft).tolist() == pytest.approx(found, abs=tolerance)
    synced = await weights_of(learner)
    merged = dict(peft.merge_and_unload().named_parameters())
    manifest = await learner.manifest()
    assert [(name, shape) for name, _, shape in manifest] == [(name, list(one.shape)) for name, one in merged.items()]
    assert synced.keys() == merged.keys()
    for name, one in merged.items():
        assert synced[name].dtype == getattr(torch, dtype)
        torch.testing.assert_close(synced[name].float(), one, rtol=0, atol=1e-6 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("umask", [0o022, 0o027])
async def test_saved_files_follow_the_umask(opened: Opener, tmp_path: Path, umask: int) -> None:
    """The final model, its adapter and a checkpoint can be read by everybody whom the umask lets in."""
    learner = await opened(with_lora(settings={"trainer": {"export": "every"}}))
    before = os.umask(umask)
    try:
        await learner.export(tmp_path / "final")
        await learner.save(tmp_path)
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.*")}
    weights = {Path(folder) / "model.safetensors" for folder in ("final", "model")}
    assert modes.keys() >= weights | {Path("final/adapter/adapter_model.safetensors")}
    assert set(modes.values()) == {0o666 & ~umask}, modes


async def test_an_adapter_is_synced_as_peft_writes_it(opened: Opener, tmp_path: Path) -> None:
    rollout = {"explorer": {"rollout_model": {"engine": "vllm"}}}
    learner = await opened(with_lora(settings=rollout, sync="adapter", target_modules=["q_proj", "down_proj"]))
    await trained(learner)
    await learner.export(tmp_path / "final")
    adapter = tmp_path / "final" / "adapter"
    files, synced = load_file(adapter / "adapter_model.safetensors"), await weights_of(learner)
    assert len(synced) == 2 * 2 * 2
    assert synced.keys() == files.keys() == {name for name, _, _ in await learner.manifest()}
    assert all(torch.equal(synced[name], one) for name, one in files.items())
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], sorted(written["target_modules"])) == (4, 16, ["down_proj", "q_proj"])


@pytest.mark.parametrize("sync", ["merged", "adapter"])
async def test_it_goes_on_from_a_checkpoint_of_adapters_to_the_bit(opened: Opener, tmp_path: Path, sync: str) -> None:
    settings = with_lora(settings={"explorer": {"rollout_model": {"engine": "vllm"}}}, sync=sync)
    learner = await opened(settings)
    await trained(learner)
    digest = await learner.save(tmp_path)
    held = read_parts(tmp_path, {})["policy"].tensors
    assert held.keys() == adapters_of(learner).state().keys()
    assert digest == learner.policy.digest(adapters_of(learner).state())
    again = await opened(settings, checkpoint=tmp_path)
    wanted, found = await trained(learner, 4, 5), await trained(again, 4, 5)
    for one, other in zip(wanted, found, strict=True):
        assert {name: value for name, value in one.items() if "time/" not in name and "perf/" not in name} == {
            name: value for name, value in other.items() if "time/" not in name and "perf/" not in name
        }
    one, other = await weights_of(learner), await weights_of(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


async def test_the_reference_is_the_model_without_adapters(folder: Path, opened: Opener) -> None:
    learner = await opened(with_lora())
    assert (await trained(learner))[-1]["actor/kl_ref_k3"] > 0
    reference, experiences = learner.reference, batch(1)
    assert reference is not None
    assert reference.policy is learner.policy
    tokens = train_tokens(experiences, with_lora().algorithm, {"rl": 1.0}, 1)
    plain, before = loaded(folder), await learner.canary_logprobs(TOKENS)
    with torch.no_grad():
        wanted = torch.cat([plain_logprobs(plain, one) for one in experiences])
    found = reference.logprobs(tokens.micro_batches(range(len(experiences)), DivisionSettings(40)), tokens.tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert await learner.canary_logprobs(TOKENS) == before, "they are on again"


@pytest.mark.parametrize("kind", ["tied", "conv1d"])
async def test_models_of_other_builds(opened: Opener, tmp_path: Path, kind: str) -> None:
    """Embeddings tied to the output layer, and GPT-2, whose weights lie transposed."""
    if kind == "tied":
        model = make_model(tmp_path / "model", tied=True)
    else:
        torch.manual_seed(0)
        shape = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0)
        GPT2LMHeadModel(shape).save_pretrained(model := tmp_path / "model")
    learner = await opened(with_lora(), model)
    await trained(learner)
    found = await learner.canary_logprobs(TOKENS)
    assert found != pytest.approx(logprobs_of(loaded(model)).tolist(), abs=1e-3)
    await learner.export(tmp_path / "final")
    for model_again in (
        loaded(tmp_path / "final"),
        PeftModel.from_pretrained(loaded(model), tmp_path / "final" / "adapter"),
    ):
        assert logprobs_of(model_again).tolist() == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lm_head", "names lm_head of the class Linear"),
        ("embed_tokens", "embed_tokens of the class Embedding"),
        ("nobody", "the model has no layer 'nobody'; its linear layers are called q_proj, k_proj, v_proj, o_proj, "),
        ("v_prj", "no layer 'v_prj'; did you mean 'v_proj'"),
    ],
)
@pytest.mark.parametrize("right", [[], ["q_proj"]])
async def test_layers_that_cannot_have_an_adapter_are_named(
    folder: Path, opened: Opener, target: str, said: str, right: list[str]
) -> None:
    """Also beside layers that can; and before a run starts, of a model whose weights are not read."""
    settings = with_lora(target_modules=[*right, target])
    for model in (settings.model, ModelConfig(model_path=str(folder), lora=settings.model.lora)):
        with pytest.raises(AdapterError, match=rf"model\.lora\.target_modules is .*'{target}'\].*{said}"):
            check_targets(model)
    with pytest.raises(AdapterError, match=rf"model\.lora\.target_modules is .*'{target}'\].*{said}"):
        await opened(settings)


def test_layers_of_a_model_that_is_not_here_are_not_judged(folder: Path) -> None:
    lora = LoraConfig(target_modules=["nobody"])
    for path in ("nobody/has-this-model", str(folder / "not-trained-yet")):
        check_targets(ModelConfig(model_path=path, lora=lora))
    check_targets(with_lora(target_modules=["q_proj", "mlp.down_proj"]).model)


@pytest.mark.parametrize(
    ("missing", "lora", "said"),
    [("peft", {}, r"install trinity-mq\[lora\]"), ("bitsandbytes", {"quantization": "4bit"}, "bitsandbytes>=")],
)
def test_what_is_not_installed_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, missing: str, lora: dict[str, Any], said: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AdapterError, match=said):
        check_lora(with_lora(**lora))


async def test_quantized_weights_are_refused_on_a_cpu(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", module_from_spec(ModuleSpec("bitsandbytes", None)))
    with pytest.raises(AdapterError, match=r"quantization is 4bit, and the model is on the CPU.*model\.device=cuda"):
        await opened(with_lora(quantization="4bit"))


@pytest.mark.parametrize(
    ("lora", "settings", "said"),
    [
        ({"sync": "adapter"}, {}, "only vllm takes an adapter"),
        (
            {"sync": "adapter", "quantization": "4bit"},
            {"explorer": {"rollout_model": {"engine": "vllm"}}},
            "which is a different model",
        ),
        ({"quantization": "8bit"}, {"trainer": {"nproc": 2}}, "cannot be sharded"),
        ({"target_modules": []}, {}, "names no layer"),
        ({"r": 0}, {}, "greater than or equal to 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    lora: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        with_lora(settings=settings, **lora)


def test_a_reference_that_moves_is_refused() -> None:
    data = with_lora().model_dump(mode="json")
    data["algorithm"]["reference"]["update"] = "ema"
    with pytest.raises(ValidationError, match="reference is the model without its adapters, which does not move"):
        Config.model_validate(data)
