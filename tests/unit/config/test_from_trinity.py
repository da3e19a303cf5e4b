"""Errors about keys of Trinity-RFT name what is here in their place, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.config.settings_table import all_settings
from trinity_mq.config.trinity_names import TASKSET, key_advice
from trinity_mq.trinity_rft.migration.transfer import is_config_key

ADVICE = {key: advice for key, advice in key_advice().items() if not key.startswith(TASKSET)}
TASKSET_ADVICE = {key.removeprefix(TASKSET): advice for key, advice in key_advice().items() if key.startswith(TASKSET)}
TINY: dict[str, Any] = {"model": {"tiny": {}}}


def test_the_page_lists_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "from-trinity.md").read_text()
    for key, text in (*ADVICE.items(), *TASKSET_ADVICE.items()):
        assert f"| `{key}` | {text} |" in page


def nested(key: str) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest) if rest else "x"}


def is_unknown_in_a_known_section(key: str) -> bool:
    section = key.rpartition(".")[0]
    return not is_config_key(key) and (not section or is_config_key(section))


@pytest.mark.parametrize("key", [key for key in ADVICE if is_unknown_in_a_known_section(key)])
def test_each_key_is_unknown_here_and_its_error_says_where_to_go(key: str) -> None:
    given = nested(key)
    if key.startswith("model."):
        given["model"] |= TINY["model"]
    with pytest.raises(ConfigError) as caught:
        load_config({**TINY, **given})
    assert f"{key}: a key of Trinity-RFT: {ADVICE[key]}" in str(caught.value)


@pytest.mark.parametrize("key", TASKSET_ADVICE)
def test_the_same_of_tasksets(key: str) -> None:
    taskset = {"storage_type": "synthetic", "path": "max3", **nested(key)}
    for buffer in ({"taskset": taskset}, {"eval_tasksets": [taskset]}):
        with pytest.raises(ConfigError, match=f"{key}: a key of Trinity-RFT"):
            load_config({**TINY, "buffer": buffer})


def test_the_settings_that_are_named_exist() -> None:
    known = {re.sub(r"\.<n>|\.0", "", setting.key) for setting in all_settings()}
    known |= {".".join(key.split(".")[:count]) for key in known for count in range(1, 6)}
    own = set(Config.model_fields["buffer"].annotation.model_fields["taskset"].annotation.model_fields)  # type: ignore[union-attr]
    for text in ADVICE.values():
        for name in re.findall(r"`([a-z_.]+)(?::[^`]*)?`", text):
            if not name.startswith("trinity-mq"):
                is_known = name in known or any(one.endswith(f".{name}") for one in known) or name in own
                assert is_known or name == "buffer.taskset.rollout_args.top_k", name


@pytest.mark.parametrize("name", ["advantage_fn_args", "policy_loss_fn_args", "kl_loss_fn_args", "kl_penalty_fn_args"])
def test_arguments_that_are_none_are_an_error_and_no_crash(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'x', wanted settings by name"):
        load_config({**TINY, "algorithm": {name: "x"}})
