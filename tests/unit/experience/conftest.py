"""Experiences that several test files use."""

import pytest
import torch

from trinity_mq.experience import EID, CustomField, Experience


@pytest.fixture
def single():
    return Experience(
        eid=EID("3/gsm8k", 7, 2, 1),
        tokens=[1, 2, 3, 4, 5],
        prompt_length=2,
        logprobs=[-0.5, -0.25, -1.0],
        reward=1.0,
        prompt_text="6 + 7 =",
        response_text="13",
        info={"answer": 13, "nested": {"list": [1, None, "x", 2.5, b"raw"]}},
        metrics={"accuracy": 1.0},
        versions=[(0, 1, 4), (2, 1, 5)],
        temperature=0.7,
        taskset="arithmetic",
        index=11,
        truncate_status="response_truncated",
        messages=[{"role": "user", "content": "6 + 7 ="}, {"role": "assistant", "content": "13"}],
        tools=[{"type": "function", "function": {"name": "add"}}],
        custom_fields=[CustomField("answer", "answers", torch.int64)],
        advantages=torch.tensor([1.0, 2.0, float("nan")]),
        returns=torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        token_level_reward=torch.tensor([0.0, 0.0, 1.0], dtype=torch.float16),
        teacher_logprobs=(-1, -2, -3),
        routed_experts=torch.arange(16, dtype=torch.uint8).reshape(4, 2, 2),
        multi_modal_inputs={"pixels": torch.rand(2, 3, 4), "size": torch.tensor(5)},
    )


@pytest.fixture
def multi():
    return Experience(tokens=[9, 8, 7, 6], prompt_length=1, action_mask=[1, 0, 1], logprobs=[-1.0, 0.0, -2.0])


@pytest.fixture
def dpo():
    return Experience(
        eid=EID(1, "a", 0, 0),
        tokens=[1, 2, 3],
        chosen=[4, 5],
        rejected=[6],
        chosen_messages=[{"role": "assistant", "content": "yes"}],
        rejected_messages=[{"role": "assistant", "content": "no"}],
        prompt_text="?",
        info={"source": "human"},
    )
