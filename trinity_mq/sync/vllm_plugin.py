"""Plug-in for vLLM's entry point ``vllm.general_plugins``: vLLM workers receive weights through our channels."""

from __future__ import annotations

from trinity_mq.engines.vllm import api as vllm_api
from trinity_mq.sync.channels.receiver import WeightReceiver


def register() -> None:
    """Register our weight-transfer backend; vLLM calls this in each of its processes."""
    vllm_api.install(WeightReceiver().receive_blocking)
