"""A model's scores of chosen tokens equal those of its logits, whatever it does after its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.unit.training.test_learner import batch, config, pack
from tests.unit.training.test_packed_rows import SHAPE, alone, saved
from trinity_mq.algorithms.scoring import HeadOperation, entropy_baselines, token_logprobs
from trinity_mq.training.model.policy import LearnerError, Policy, TokenScorer, detect_head_operation

AFTER: dict[str, tuple[PreTrainedConfig, HeadOperation]] = {
    "nothing": (transformers.LlamaConfig(**SHAPE), HeadOperation()),
    "softcap": (
        transformers.Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=2.0),
        HeadOperation(softcap=2.0),
    ),
    "scale": (transformers.CohereConfig(**SHAPE, logit_scale=0.5), HeadOperation(scale=0.5)),
    "divisor": (transformers.GraniteConfig(**SHAPE, logits_scaling=4.0), HeadOperation(scale=0.25)),
}


class Lifted(transformers.LlamaForCausalLM):
    """A model that does with its logits what nobody could know."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        found = super().forward(*arguments, **named)
        found.logits = found.logits.abs()
        return found


def scored(scorer: TokenScorer, ids: Tensor) -> tuple[Any, Any]:
    """Return the scores of some tokens, and those of the model's logits."""
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])
    targets, temperature = ids[rows, columns + 1], torch.tensor([1.0, 0.5, 2.0])
    inputs = {"input_ids": ids[:, :-1]}
    found = scorer(inputs, (rows, columns), targets, temperature, entropy_gradient=True, with_baseline=True)
    logits = scorer.model(**inputs).logits[rows, columns]
    wanted = token_logprobs(logits, targets, temperature, entropy_gradient=True)
    return found, (*wanted, entropy_baselines(logits, temperature))


@pytest.mark.parametrize("name", [*AFTER, "unknown"])
def test_scores_are_those_of_the_models_logits(name: str) -> None:
    torch.manual_seed(0)
    if name == "unknown":
        model, known = Lifted(transformers.LlamaConfig(**SHAPE)).eval(), None
    else:
        shape, known = AFTER[name]
        model = AutoModelForCausalLM.from_config(shape).eval()
    scorer = TokenScorer(model)
    assert scorer.after == known
    found, wanted = scored(scorer, torch.randint(0, 64, (2, 6)))
    torch.testing.assert_close(tuple(found), wanted, rtol=1e-5, atol=1e-5)
    leaves = list(model.parameters())
    slopes = [torch.autograd.grad(one[0].sum() + one[1].sum(), leaves, allow_unused=True) for one in (found, wanted)]
    assert any(one is not None and one.abs().max() > 0.01 for one in slopes[1])
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


def test_a_setting_that_the_model_does_not_follow_is_not_believed() -> None:
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).eval()
    assert detect_head_operation(model) == HeadOperation()
    model.config.final_logit_softcapping = 30.0
    assert detect_head_operation(model) is None


def test_the_head_sees_no_token(folder: Path) -> None:
    policy = Policy(config().model, folder, 0)
    sizes: list[int] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda module, given, found: sizes.append(len(found)))
    (padded,) = pack(batch(1), 16384)
    policy.score(padded, entropy_gradient=False)
    assert sizes == [0]


def test_unknown_logits_are_said_once_and_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(transformers.LlamaConfig(**SHAPE), tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", Lifted.from_pretrained)
    with capture_logs() as logs:
        policy = Policy(config().model, tmp_path, 0)
    assert [(entry["event"], entry["model"]) for entry in logs] == [("logits_not_chunked", "Lifted")]
    (padded,) = pack(batch(1), 16384)
    sizes: list[int] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda module, given, found: sizes.append(len(found)))
    found, _ = policy.score(padded, entropy_gradient=False)
    assert sizes == [padded.tokens]
    by_index = torch.zeros_like(found).index_copy(0, padded.index, found)
    torch.testing.assert_close(by_index.detach(), alone(tmp_path, batch(1)), rtol=0, atol=1e-5)


def test_a_model_without_a_head_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "get_output_embeddings", lambda self: None)
    with pytest.raises(LearnerError, match=r"Qwen3ForCausalLM has no output embeddings"):
        Policy(config().model, folder, 0)
