"""Whether the installed vLLM has what we use: in its source, as the GPU's wheel, and by its own parser of options."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from trinity_mq.config import ModelConfig, RolloutModelConfig
from trinity_mq.engines.vllm import api

from .interface import PROTOCOL, commands, missing


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_everything_that_is_used_exists() -> None:
    assert missing(installed()) == []


def test_vllm_has_its_own_build_of_harmony() -> None:
    """The package openai-harmony, which renderers asks for, installs files of the same names: scripts/test-vllm."""
    sources = {file.name: file for file in importlib.metadata.files("oss-harmony") or [] if file.hash is not None}
    library = sources["openai_harmony.abi3.so"]
    assert library.hash is not None
    checksum = hashlib.new(library.hash.mode, library.read_binary()).digest()
    assert base64.urlsafe_b64encode(checksum).decode().rstrip("=") == library.hash.value


def test_what_a_version_has_lost_is_named(tmp_path: Path) -> None:
    """A copy of the files that the check reads, without one option, route, abstract method of ours and field each."""
    losses = {
        "engine/arg_utils.py": ("--max-cpu-loras", "--max-gone-loras"),
        "entrypoints/rl/online/api_router.py": ('"/finish_weight_update"', '"/gone"'),
        "distributed/weight_transfer/base.py": ("def receive_weights(", "def get_weights("),
        PROTOCOL: ("    cache_salt:", "    gone_salt:"),
    }
    for path in (
        *installed().rglob("entrypoints/**/*.py"),
        *installed().glob("*.py"),
        *map(installed().joinpath, losses),
    ):
        place = tmp_path / path.relative_to(installed())
        place.parent.mkdir(parents=True, exist_ok=True)
        old, new = losses.get(str(path.relative_to(installed())), ("", ""))
        text = path.read_text()
        assert old in text
        place.write_text(text.replace(old, new) if old else text)
    lacks = missing(tmp_path)
    for line in (
        "option --max-cpu-loras",
        "route /finish_weight_update",
        "our implementation of WeightTransferEngine.get_weights",
        "method WeightTransferEngine.receive_weights",
        "field cache_salt of a request",
    ):
        assert line in lacks
    assert "route /pause" not in lacks
    assert "sampling parameter logprobs" not in lacks


IMPORTS_VLLM = pytest.mark.filterwarnings("ignore")
"""Its imports warn."""


def parsed(command: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(command[4:])  # after python -m MODULE PID


@IMPORTS_VLLM
def test_vllm_s_server_starts_whatever_the_tokenizer_writes() -> None:
    """Its route for decisions, which would write letters and a conversation at the start, is off for every model."""
    from vllm.entrypoints.generate.structured_decisions import strategies

    model = SimpleNamespace(architecture="Qwen3ForCausalLM", logprobs_mode="processed_logprobs")
    assert strategies.select_read_strategy(model, ["generate"]) is strategies.NextTokenStrategy
    with mock.patch.dict(strategies.READ_STRATEGIES):
        api.switch_off_decisions()
        with pytest.raises(ValueError, match="does not support Qwen3ForCausalLM"):  # with which vLLM goes on
            strategies.select_read_strategy(model, ["generate"])


@IMPORTS_VLLM
@pytest.mark.parametrize("command", list(commands()), ids=lambda command: str(len(command)))
def test_vllm_s_own_parser_takes_each_command(command: list[str]) -> None:
    arguments = parsed(command)
    assert (str(arguments.model), str(arguments.uds), arguments.max_model_len) == ("/model", "/socket", 65)
    assert arguments.hf_overrides == {"head_dtype": "float32"}
    assert bool(arguments.enable_lora) == ("--enable-lora" in command)
    assert bool(arguments.enable_return_routed_experts) == ("--distributed-executor-backend" not in command)


@IMPORTS_VLLM
@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        (['--hf-overrides={"rope_theta": 7.0}'], {"head_dtype": "float32", "rope_theta": 7.0}),
        (["--hf_overrides", '{"head_dtype": "model"}'], {"head_dtype": "model"}),
        (["--hf-overrides.rope_theta", "7.0"], {"head_dtype": "float32", "rope_theta": 7.0}),
        (["--hf-overrides.head_dtype=model"], {"head_dtype": "model"}),
    ],
)
def test_overrides_of_a_user_reach_vllm(options: list[str], overrides: dict[str, Any]) -> None:
    model = ModelConfig.model_validate({"tiny": {}, "dtype": "bfloat16"})
    rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": {"extra_args": options}})
    command = api.server_command(Path("/model"), Path("/socket"), model, rollout, 64, cpu=True)
    assert parsed(command).hf_overrides == overrides
