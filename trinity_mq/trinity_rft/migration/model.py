"""The section ``model``: lengths, LoRA, and the sampling parameters, which belong to the rollout engine here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_mq.trinity_rft.migration.move import LeftOut, SettingsTransfer
from trinity_mq.trinity_rft.migration.values import number, whole

LENGTHS = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
"""Length limits: the total, the prompt and the response."""


def model(move: SettingsTransfer) -> None:
    """Move the section."""
    move.keep("model.model_path")
    lengths(move, "model.")
    for name in ("temperature", "top_p"):
        engine = move.take(f"explorer.rollout_model.{name}")
        value = move.take(f"model.{name}") if engine is None else engine
        move.leave_out(f"model.{name}", "explorer.rollout_model has its own", matters=False)
        if value is None:
            continue
        comment = f"was model.{name}" if engine is None else ""
        move.put(f"explorer.rollout_model.{name}", value, *([comment] if comment else []))
        if name == "top_p" and (number(value) or 1.0) < 1:
            _truncated(move)
    for place in ("model.", "explorer.rollout_model."):
        for name, neutral in (("top_k", -1), ("repetition_penalty", 1.0), ("logprobs", 0), ("min_response_tokens", 0)):
            if number(move.peek(place + name)) == neutral:
                move.take(place + name)
    move.leave_out("model.logprobs", "the logprob of each sampled token is always there", matters=False)
    move.leave_out(
        "explorer.rollout_model.logprobs", "the logprob of each sampled token is always there", matters=False
    )
    move.leave_out("model.critic_model_path", "the critic begins as the policy")
    move.leave_out("model.enable_prompt_truncation", "a prompt over max_prompt_tokens fails, it is never cut")
    if not move.peek("model.tinker.enable"):
        move.take("model.tinker")
    if not move.peek("model.external_model.enable"):
        move.take("model.external_model")
    _lora(move)


def sampling(move: SettingsTransfer) -> dict[str, Any]:
    """Return the sampling parameters of the model that belong to each taskset here."""
    parameters = {}
    for name in ("top_k", "repetition_penalty"):
        engine_value, model_value = move.take(f"explorer.rollout_model.{name}"), move.take(f"model.{name}")
        if (value := model_value if engine_value is None else engine_value) is not None:
            parameters[name] = value
            _truncated(move)
    return parameters


def _truncated(move: SettingsTransfer) -> None:
    if not move.settings.get("algorithm", {}).get("allow_truncated_sampling"):
        move.put(
            "algorithm.allow_truncated_sampling", True,
            "training rollouts are sampled with top_p, top_k or a penalty: their logprobs are not the policy's. "
            "Trinity-RFT trains on them without a warning; better sample without them",
        )  # fmt: skip


def lengths(move: SettingsTransfer, there: str, here: str = "model.") -> None:
    """Move the length limits, and fill in the limits that Trinity-RFT would fill in."""
    limits = {name: value for name in LENGTHS if (value := move.take(there + name)) is not None}
    numbers = {name: whole_value for name, value in limits.items() if (whole_value := whole(value)) is not None}
    comments: dict[str, str] = {}
    if len(numbers) == len(limits) and limits:  # otherwise a limit is a variable that is not set on this machine
        filled, comments = _filled_limits(numbers)
        limits |= {name: value for name, value in filled.items() if value != numbers.get(name)}
    for name in LENGTHS:
        if name in limits:
            move.put(here + name, limits[name], *([comments[name]] if name in comments else []))


def _filled_limits(limits: Mapping[str, int]) -> tuple[dict[str, int], dict[str, str]]:
    """Return all three limits, computed from the given ones, and comments on the computed limits."""
    total, prompt, response = (limits.get(name) for name in LENGTHS)
    comments = {}
    if total is None:
        if prompt is None or response is None:
            return dict(limits), {}
        total, comments["max_model_len"] = prompt + response, "prompt and response together"
    elif prompt is None and response is None:
        prompt = total // 2
        comments |= dict.fromkeys(LENGTHS[1:], "half of max_model_len, as Trinity-RFT fills it in")
    if prompt is None:
        prompt = total - (response or 0)
        comments.setdefault("max_prompt_tokens", "what max_response_tokens leaves of max_model_len")
    if response is None:
        response = total - prompt
        comments["max_response_tokens"] = "what max_prompt_tokens leaves of max_model_len"
    if prompt + response > total:
        comments["max_prompt_tokens"] = f"was {prompt}, which is over max_model_len with max_response_tokens"
        prompt = total - response
    return dict(zip(LENGTHS, (total, prompt, response), strict=True)), comments


def _lora(move: SettingsTransfer) -> None:
    adapters = move.take_mappings("model.lora_configs")
    if not adapters:
        return
    first, *other_adapters = adapters
    item = move.item(first, ("model", "lora"), "model.lora_configs.0")
    move.put("model.lora", item.settings)
    for old, new, default in (("lora_rank", "r", 32), ("lora_alpha", "alpha", 32)):
        value = item.take(old)
        comment = f"was model.lora_configs[0].{old}" if value is not None else "Trinity-RFT's default"
        item.put(new, default if value is None else value, comment)
    item.keep("target_modules")
    for name in ("name", "base_model_name", "lora_dtype", "is_dummy"):
        item.leave_out(name, "it follows from the model", matters=False)
    item.leave_out("path", "a run begins with fresh adapters; merge yours into the model first")
    item.give_up("no counterpart here")
    for number_, adapter in enumerate(other_adapters, 1):
        move.lost(LeftOut(f"model.lora_configs.{number_}", adapter, "a run trains one adapter", matters=True))
