"""The experiences of the golden bodies."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import torch

from trinity_mq.experience import EID, CustomField, Experience


def one(eid: tuple[int | str, int | str, int, int, str], tokens: list[int], **fields: Any) -> Experience:
    """Return an experience; its id is batch, task, run, step and suffix."""
    return Experience(eid=EID(*eid), tokens=tokens, **fields)


TINY = one((1, 2, 0, 0, "0a1b2c3d4e5f"), [11, 12, 13], prompt_length=1, logprobs=[-0.5, -1.25], reward=1.0)

SINGLE = Experience(
    eid=EID(batch=7, task=3, run=1, step=0, suffix="single000001"),
    tokens=[101, 102, 103, 2147483647, 0],
    prompt_length=3,
    logprobs=[-0.5, -2.75],
    reward=-0.625,
    token_level_reward=[0.0, -0.625],
    advantages=[0.25, 0.125],
    returns=[-1.0, -0.625],
    teacher_logprobs=[-0.25, float("-inf")],
    truncate_status="response_truncated",
    info={"score": 3, "exact": False, "note": "ok"},
    metrics={"length": 2.0, "time/seconds": 0.125},
    response_text="=4",
    prompt_text="2+2",
    versions=[(0, 1, 40), (1, 1, 41)],
    temperature=0.75,
    taskset="arithmetic",
    index=12,
    custom_fields=[CustomField("score", "scores", torch.float32), CustomField("exact", "hits", torch.bool)],
)


COMPRESSED = {"zstd"}


def multi() -> list[Experience]:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "get", "index": 0}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Rain."},
    ]
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
    first: dict[str, Any] = {
        "action_mask": [True, True, False, False, True, True], "logprobs": [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
        "reward": 1.0, "messages": turns, "tools": tools, "versions": [(0, 1, 5), (4, 2, 0)], "metrics": {"turns": 2.0},
    }  # fmt: skip
    second: dict[str, Any] = {
        "action_mask": [False], "logprobs": [-1.5], "reward": 0.0, "messages": [], "versions": [(0, 2, 0)]
    }  # fmt: skip
    return [
        one((4, 0, 0, 2, "multi0000001"), [1, 5, 6, 7, 8, 9, 10, 2], prompt_length=2, temperature=1.0, **first),
        one((4, 0, 1, 2, "multi0000002"), [1, 5, 9], prompt_length=2, temperature=1.0, **second),
    ]


def dpo() -> list[Experience]:
    asked = [{"role": "user", "content": "Hi"}]
    chosen, rejected = ([*asked, {"role": "assistant", "content": text}] for text in ("Hello", "No"))
    messages = {"messages": asked, "chosen_messages": chosen, "rejected_messages": rejected}
    return [
        one(("dpo", 0, 0, 0, "dpo000000001"), [1, 2, 3], chosen=[4, 5], rejected=[6], **messages, prompt_text="Hi"),
        one(("dpo", 1, 0, 0, "dpo000000002"), [9], chosen=[-1], rejected=[7, 8, 9], reward=0.5),
    ]


def mixed() -> list[Experience]:
    """All three types, and every field absent from at least one of them."""
    first: dict[str, Any] = {
        "prompt_length": 2, "logprobs": [-1.0, -2.0], "reward": 0.5, "response_text": "yes", "taskset": "a", "index": 3,
        "temperature": 1.0, "info": {"k": [1, -2, {"x": None}]}, "versions": [(0, 1, 1)],
    }  # fmt: skip
    second: dict[str, Any] = {
        "prompt_length": 1, "action_mask": [1, 0], "logprobs": torch.tensor([-0.5, -0.25], dtype=torch.bfloat16),
        "response_text": "yes", "truncate_status": "response_truncated", "advantages": [0.5, -0.5],
        "metrics": {"m": -1.0}, "messages": [{"role": "user", "content": "?"}],
    }  # fmt: skip
    third: dict[str, Any] = {
        "chosen": [3], "rejected": [4, 5], "reward": float("nan"), "response_text": "no", "taskset": "b", "index": -7,
        "custom_fields": [CustomField("k", "ks", torch.int64)],
    }  # fmt: skip
    fourth: dict[str, Any] = {
        "prompt_length": 4, "truncate_status": "prompt_truncated", "prompt_text": "", "reward": float("inf"),
        "taskset": "a", "temperature": 0.0,
    }  # fmt: skip
    return [
        one((5, 0, 0, 0, "mixed0000001"), [1, 2, 3, 4], **first),
        one((5, 0, 1, 0, "mixed0000002"), [1, 2, 5], **second),
        one((5, 1, 0, -1, "mixed0000003"), [1, 2], **third),
        one((5, 2, 0, 3, "mixed0000004"), [1, 2, 3, 4, 5], **fourth),
    ]


def experts() -> list[Experience]:
    return [
        Experience(
            eid=EID(batch=9, task=task, suffix=f"experts{task:05}"),
            tokens=list(range(length)),
            prompt_length=1,
            logprobs=torch.tensor([-0.5 * n for n in range(1, length)], dtype=torch.bfloat16),
            teacher_logprobs=torch.tensor([-0.25 * n for n in range(1, length)], dtype=torch.float16),
            routed_experts=torch.arange(200, 200 + (length - 1) * 4).to(torch.uint8).reshape(length - 1, 2, 2),
            reward=float(task),
        )
        for task, length in ((0, 4), (1, 2))
    ]


def multimodal() -> list[Experience]:
    image = torch.arange(12, dtype=torch.float32).reshape(2, 2, 3) / 4
    return [
        Experience(
            eid=EID(batch=2, task=0, suffix="multimodal01"),
            tokens=[1, 2, 3],
            prompt_length=2,
            multi_modal_inputs={"pixel_values": image, "image_grid_thw": torch.tensor([[1, 2, 3]])},
            info={
                "embedding": torch.tensor([0.5, -1.5], dtype=torch.float16),
                "nested": {"array": np.array([[1, 2], [3, -4]], dtype=np.int16), "scalar": torch.tensor(7)},
            },
        ),
        Experience(
            eid=EID(batch=2, task=0, run=1, suffix="multimodal02"),
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            multi_modal_inputs={"pixel_values": image[:1] - 1, "weight": torch.tensor(0.5)},
        ),
        Experience(
            eid=EID(batch=2, task=1, suffix="multimodal03"),
            tokens=[1, 2],
            prompt_length=1,
            multi_modal_inputs={
                "pixel_values": torch.tensor([[255, 0, 7]], dtype=torch.uint8),
                "empty": torch.zeros((0, 3)),
            },
            info={"list": [np.array([True, False]), torch.zeros((0,), dtype=torch.int32)]},
        ),
        Experience(eid=EID(batch=2, task=2, suffix="multimodal04"), tokens=[1, 2], prompt_length=1),
    ]


def unicode() -> list[Experience]:
    texts = ["Größe — “π”", "二乘三等于六", "🙂👩‍👩‍👧", "a\u0000b", ""]
    return [
        Experience(
            eid=EID(batch=f"{number}/täsk%", task=text, suffix=f"ü{number}"),
            tokens=[1, 2],
            prompt_length=1,
            response_text=text,
            prompt_text=texts[number % 2],
            taskset="тест",
            info={text or "leer": {"ключ": text}},
            metrics={"метрика": 1.5},
            messages=[{"role": "user", "content": text}],
        )
        for number, text in enumerate(texts)
    ]


def mixed_ids() -> list[Experience]:
    ids: list[tuple[int | str, int | str]] = [
        (1, "a/b"), ("3/gsm8k", -5), (-9007199254740991, 2**60), ("", "7")
    ]  # fmt: skip
    return [
        Experience(eid=EID(batch, task, number - 1, 2**40 + number, "same"), tokens=[1, 2], prompt_length=1)
        for number, (batch, task) in enumerate(ids)
    ]


def documents() -> list[Experience]:
    info = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 127, 128, -129, 65535, 65536, -(2**31), 2**32, 2**53 - 1, 2**53, 2**63, 2**64 - 1, -(2**63)],
        "floats": [0.0, -0.0, 0.1, 1e300, 5e-324, float("nan"), float("inf"), float("-inf")],
        "bytes": b"\x00\xff\x80raw",
        "text": "x" * 300,
        "long": list(range(20)),
        "wide": {f"key{number}": number for number in range(20)},
        "deep": [[[[{"a": [{"b": []}]}]]]],
        "when": msgpack.Timestamp(1_700_000_000, 5),
        "before": msgpack.Timestamp(-1, 999_999_999),
    }
    return [Experience(eid=EID(batch=0, suffix="documents001"), tokens=[1, 2], prompt_length=1, info=info)]


def dtypes() -> list[Experience]:
    info = {
        "float64": torch.tensor([0.1, float("nan")], dtype=torch.float64),
        "float32": torch.tensor([0.1, float("-inf")]),
        "float16": torch.tensor([65504.0, -0.0], dtype=torch.float16),
        "bfloat16": torch.tensor([1.0078125, 3e38], dtype=torch.bfloat16),
        "int64": torch.tensor([2**63 - 1, -(2**63), 2**53 - 1]),
        "int32": torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
        "int16": torch.tensor([32767, -32768], dtype=torch.int16),
        "int8": torch.tensor([127, -128, 1], dtype=torch.int8),
        "uint64": torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
        "uint32": torch.tensor([2**32 - 1, 0], dtype=torch.uint32),
        "uint16": torch.tensor([65535, 0], dtype=torch.uint16),
        "uint8": torch.tensor([255, 0], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
    }
    return [Experience(eid=EID(batch=0, suffix="dtypes000001"), tokens=[1, 2], prompt_length=1, info=info)]


def float8() -> list[Experience]:
    info = {
        "e4m3": torch.tensor([1.125, -448.0, float("nan")]).to(torch.float8_e4m3fn),
        "e5m2": torch.tensor([1.25, -57344.0, float("inf")]).to(torch.float8_e5m2),
    }
    return [Experience(eid=EID(batch=0, suffix="float8000001"), tokens=[1, 2], prompt_length=1, info=info)]


def cases() -> dict[str, list[Experience]]:
    made = (multi, dpo, mixed, experts, multimodal, unicode, mixed_ids, documents, dtypes, float8)
    return {
        "tiny": [TINY],
        "single": [SINGLE],
        "empty": [],
        "zstd": mixed(),
        **{make.__name__: make() for make in made},
    }
