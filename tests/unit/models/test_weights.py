import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.engines.torch.weights import WeightsError, check, copy_into, named_weights


def tied_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


def fresh(generator: TextGenerator) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) * 0.05 for name, tensor in named_weights(generator.model).items()}


def test_new_weights_are_what_the_model_then_computes_with(generator: TextGenerator, folder: object) -> None:
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder)
    places = {name: tensor.data_ptr() for name, tensor in named_weights(generator.model).items()}
    generator.apply(generator.check(dict(trained.named_parameters())))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(generator.model(ids).logits, trained.eval()(ids).logits)
    assert {name: tensor.data_ptr() for name, tensor in named_weights(generator.model).items()} == places, "in place"


def test_tied_weights_appear_once_and_may_be_sent_under_both_names() -> None:
    model = tied_model()
    names = named_weights(model)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    new = {name: torch.full_like(tensor, 0.5) for name, tensor in named_weights(model).items()}
    copy_into(model, check(model, {**new, "lm_head.weight": new["model.embed_tokens.weight"]}))
    assert model.lm_head.weight.eq(0.5).all()
    with pytest.raises(WeightsError, match="tied"):
        check(model, {**new, "lm_head.weight": torch.zeros_like(new["model.embed_tokens.weight"])})


def test_what_does_not_fit_is_refused_before_anything_is_touched(generator: TextGenerator) -> None:
    before = {name: tensor.detach().clone() for name, tensor in named_weights(generator.model).items()}
    good = fresh(generator)
    missing = {name: tensor for name, tensor in good.items() if name != "lm_head.weight"}
    with pytest.raises(WeightsError, match=r"1 of \d+ weights are missing, first 'lm_head.weight'"):
        generator.check(missing)
    with pytest.raises(WeightsError, match=r"nearest known name: 'lm_head\.weight'"):
        generator.check({**good, "lm_head.weights": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"'lm_head.weight' has shape \[16, 63\], the model wants \[16, 64\]"):
        generator.check({**good, "lm_head.weight": torch.zeros(16, 63)})
    after = named_weights(generator.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_dtypes_are_converted(generator: TextGenerator) -> None:
    sent = {name: tensor.bfloat16() for name, tensor in fresh(generator).items()}
    generator.apply(generator.check(sent))
    assert torch.equal(named_weights(generator.model)["lm_head.weight"], sent["lm_head.weight"].float())
