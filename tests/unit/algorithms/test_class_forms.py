"""Losses and advantages in Trinity-RFT's class form have the numbers of a direct call of the class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trinity_mq.algorithms.class_losses import class_losses, load_classes
from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.evaluator import component_weights, evaluate
from trinity_mq.algorithms.plugins import PluginError
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig, Config, load_config
from trinity_mq.config.algorithm.pieces import LossConfig, PluginPiece
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.runtime.plugins import add_plugins, resolve

pytestmark = pytest.mark.usefixtures("fresh_imports")

PLUGIN = '''
from typing import Any, Dict, List, Tuple

import torch

from trinity_mq.algorithms import (
    ADVANTAGE_FN, ALGORITHM_TYPE, ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN,
    AdvantageFn, AlgorithmType, EntropyLossFn, GroupAdvantage, KLFn, PolicyLossFn, aggregate_loss, masked_mean,
    masked_whiten,
)
from trinity_mq.experience import Experience, group_by


@POLICY_LOSS_FN.register_module("centred")
class Centred(PolicyLossFn):
    """Not a sum over tokens: the ratios are divided by their mean over the step."""

    def __init__(self, backend="verl", tau=1.0, loss_agg_mode="token-mean"):
        super().__init__(backend=backend)
        self.tau, self.loss_agg_mode = tau, loss_agg_mode

    def __call__(self, logprob, old_logprob, action_mask, advantages, **kwargs) -> Tuple[torch.Tensor, Dict]:
        ratio = torch.exp(logprob - old_logprob)
        ratio = ratio / masked_mean(ratio, action_mask)
        loss = aggregate_loss(-advantages * ratio / self.tau, action_mask, loss_agg_mode=self.loss_agg_mode)
        return loss, {"centred_loss": loss.detach().item(), "mean_ratio": ratio.mean().detach()}

    @classmethod
    def default_args(cls):
        return {"tau": 2.0, "loss_agg_mode": "token-mean"}


@POLICY_LOSS_FN.register_module(module_name="mixed")
class Mixed(PolicyLossFn):
    def __init__(self, mu=0.25):
        self.mu = mu

    def __call__(self, logprob, action_mask, advantages, expert_mask, level, ref_logprob, **kwargs):
        own = aggregate_loss(-(advantages * logprob)[~expert_mask], action_mask[~expert_mask], "seq-mean-token-sum")
        expert = aggregate_loss(-logprob[expert_mask], action_mask[expert_mask])
        near = aggregate_loss((logprob - ref_logprob) ** 2, action_mask)
        return (1 - self.mu) * own + self.mu * expert * level.float().mean() + near, {}


@KL_FN.register_module("cubic")
class Cubic(KLFn):
    def calculate_kl(self, logprob, ref_logprob, old_logprob=None):
        return (logprob - ref_logprob).abs() ** 3 * torch.exp(logprob - old_logprob)


@ENTROPY_LOSS_FN.register_module("square")
class Square(EntropyLossFn):
    def __init__(self, entropy_coef):
        self.entropy_coef = entropy_coef

    def __call__(self, entropy, action_mask, loss_agg_mode="token-mean", **kwargs):
        term = aggregate_loss(entropy ** 2 * kwargs["advantages"], action_mask, loss_agg_mode=loss_agg_mode)
        return term * self.entropy_coef, {"entropy_loss": term.detach().item()}


@ADVANTAGE_FN.register_module("median")
class Median(GroupAdvantage):
    def __init__(self, weight=1.0):
        self.weight = weight

    def group_experiences(self, exps):
        return group_by(exps, id_type="task")

    def calculate_group_advantage(self, group_id, exps: List[Experience]):
        with torch.no_grad():
            middle = torch.tensor([exp.reward for exp in exps]).median()
            if len(exps) == 1:
                exps.clear()
            for exp in exps:
                exp.advantages = self.weight * (exp.reward - middle) * exp.action_mask
                exp.returns = exp.advantages.clone()
        return exps, {"median": middle.item()}

    @classmethod
    def default_args(cls):
        return {"weight": 3.0}


@ADVANTAGE_FN.register_module("whitened")
class Whitened(AdvantageFn):
    def __init__(self, gamma=0.5):
        self.gamma = gamma

    def __call__(self, exps: Any, **kwargs):
        rewards, mask = exps.batch["token_level_rewards"], exps.batch["response_mask"]
        returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1])):
            running = rewards[:, t] + self.gamma * running
            returns[:, t] = running
            running = running * mask[:, t]
        exps.batch["advantages"] = masked_whiten(returns, mask) * mask
        exps.batch["returns"] = returns
        return exps, {"tasks": len(set(exps.non_tensor_batch["uid"])), "rows": exps.batch.batch_size[0]}

    @classmethod
    def default_args(cls):
        return {"gamma": 0.5}


@ALGORITHM_TYPE.register_module("centred_algorithm")
class CentredAlgorithm(AlgorithmType):
    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: str = "experience"

    @classmethod
    def default_config(cls) -> Dict:
        return {
            "repeat_times": 4,
            "advantage_fn": "median",
            "sample_strategy": "warmup",
            "policy_loss_fn": "centred",
            "kl_penalty_fn": "none",
            "kl_loss_fn": "cubic",
            "entropy_loss_fn": "default",
        }
'''
LENGTHS = (3, 1, 4, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "class_forms_plugin.py").write_text(PLUGIN)
    add_plugins([str(tmp_path)])
    return tmp_path


def configured(folder: Path, **algorithm: Any) -> Config:
    settings = {"model": {"model_path": "m"}, "buffer": {"taskset": {"path": "x"}}, "plugin_dirs": [str(folder)]}
    return load_config({**settings, "algorithm": algorithm})


def class_named(name: str) -> Any:
    return resolve("class", f"class_forms_plugin.{name}")


def step() -> TokenView:
    """Return the tokens of four sequences, the second and third imitated."""
    random = torch.Generator().manual_seed(7)
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    logprob, mu, ref, advantage, entropy = torch.rand(5, len(segment), generator=random, dtype=torch.float64) * 2 - 1
    return TokenView(
        logprob=logprob - 1,
        mu=mu - 1,
        advantage=advantage,
        scale=torch.full_like(mu, 0.1),
        segment=segment,
        ref=ref - 1,
        entropy=entropy + 1,
        custom={"level": torch.tensor([2.0, 2.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0, 7.0, 7.0])},
    )


IS_EXPERT = torch.tensor([False] * 3 + [True] * 5 + [False] * 2)


def padded(values: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(values, list(LENGTHS))), batch_first=True)


def direct_inputs(view: TokenView) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logprobs with gradient, and the tensors of a direct call, padded."""
    logprob = view.logprob.clone().requires_grad_()
    assert view.ref is not None
    inputs = {"logprob": padded(logprob), "action_mask": padded(torch.ones_like(view.segment)).bool()}
    inputs |= {"old_logprob": padded(view.mu), "ref_logprob": padded(view.ref), "advantages": padded(view.advantage)}
    inputs |= {"expert_mask": torch.tensor([False, True, True, False]), "level": torch.tensor([2.0, 3.0, 5.0, 7.0])}
    return logprob, inputs


def bridged(config: AlgorithmConfig, view: TokenView) -> tuple[float, Tensor, Tensor, Mapping[str, float]]:
    """Return loss, gradients of logprob and entropy, and metrics over two micro-batches of two sequences each."""
    result = class_losses(view, config, IS_EXPERT)
    logprob, entropy = view.logprob.clone().requires_grad_(), view.entropy
    assert entropy is not None
    entropy = entropy.clone().requires_grad_()
    loss = 0.0
    for sequences in ((0, 3), (1, 2)):
        live = {name: column for name, column in vars(view).items() if isinstance(column, Tensor)}
        part = TokenView(**{**live, "logprob": logprob, "entropy": entropy, **result.columns}, custom=view.custom)
        part = part.where(torch.isin(view.segment, torch.tensor(sequences)))
        terms = evaluate({"rl": part}, config, component_weights(config, 1), entropy_coef=config.entropy_coef)
        torch.autograd.backward(terms.loss)
        loss += terms.loss.item()
    assert logprob.grad is not None
    return loss, logprob.grad, torch.zeros_like(entropy) if entropy.grad is None else entropy.grad, result.metrics


MODE = "seq-mean-token-mean"
KL = {"kl_loss_fn": "cubic", "kl_loss_fn_args": {"kl_coef": 0.3}}
TERMS = {"entropy_loss_fn": "square", "entropy_loss_fn_args": {"entropy_coef": 0.2}, **KL, "loss_agg_mode": MODE}
OTHER = {"policy_loss_fn_args": {"tau": 0.5, "loss_agg_mode": "token-mean"}, "loss_agg_mode": "seq-mean-token-sum"}
DIRECT: dict[str, tuple[dict[str, Any], dict[str, tuple[str, dict[str, Any]]]]] = {
    "default arguments": ({"policy_loss_fn": "centred"}, {"pg_loss": ("Centred", {"tau": 2.0})}),
    "other arguments": (
        {"policy_loss_fn": "centred", **OTHER},
        {"pg_loss": ("Centred", {"tau": 0.5, "loss_agg_mode": "seq-mean-token-sum"})},
    ),
    "imitated answers": (
        {"policy_loss_fn": "mixed", "policy_loss_fn_args": {"mu": 0.4}},
        {"pg_loss": ("Mixed", {"mu": 0.4})},
    ),
    "three terms": (
        {"policy_loss_fn": "centred", **TERMS},
        {
            "pg_loss": ("Centred", {"tau": 2.0, "loss_agg_mode": MODE}),
            "kl_loss": ("Cubic", {"kl_coef": 0.3}),
            "entropy_loss": ("Square", {"entropy_coef": 0.2}),
        },
    ),
    "a KL beside a built-in loss": (KL, {"kl_loss": ("Cubic", {"kl_coef": 0.3})}),
}


def direct_terms(
    classes: Mapping[str, tuple[str, dict[str, Any]]], view: TokenView, mode: str
) -> tuple[dict[str, tuple[Tensor, Mapping[str, Any]]], Tensor, Tensor]:
    """Return what direct calls of classes return, by term; and the logprobs and entropies that have the gradient."""
    logprob, inputs = direct_inputs(view)
    assert view.entropy is not None
    entropy = view.entropy.clone().requires_grad_()
    found = {}
    for term, (name, args) in classes.items():
        made = class_named(name)(**args)
        if term == "kl_loss":
            names = ("logprob", "ref_logprob", "action_mask", "old_logprob")
            policy, ref, mask, old = (inputs[each] for each in names)
            found[term] = made.calculate_kl_loss(policy, ref, mask, mode, old)
        elif term == "entropy_loss":
            value, metrics = made(padded(entropy), loss_agg_mode=mode, **inputs)
            found[term] = -value, metrics
        else:
            found[term] = made(**inputs)
    return found, logprob, entropy


@pytest.mark.parametrize("name", DIRECT)
def test_terms_have_the_value_and_the_gradient_of_direct_calls(folder: Path, name: str) -> None:
    algorithm, classes = DIRECT[name]
    config, view = configured(folder, **{"kl_loss_fn": "none", **algorithm}).algorithm, step()
    load_classes(config)
    terms, logprob, entropy = direct_terms(classes, view, algorithm.get("loss_agg_mode", "token-mean"))
    expected = torch.stack([value for value, _ in terms.values()]).sum()
    if "pg_loss" not in terms:
        plain = configured(folder, kl_loss_fn="none").algorithm
        expected = expected + evaluate({"rl": replace(view, logprob=logprob)}, plain, component_weights(plain, 1)).loss
    torch.autograd.backward(expected)
    loss, gradient, of_entropy, metrics = bridged(config, view)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, logprob.grad, rtol=1e-12, atol=1e-12)
    wanted = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    torch.testing.assert_close(of_entropy, wanted, rtol=1e-12, atol=1e-12)
    for term, (value, own_metrics) in terms.items():
        assert metrics[term] == pytest.approx(value.item())
        for key, number in own_metrics.items():
            assert key in terms or metrics[key] == pytest.approx(float(number))


def experiences() -> list[Experience]:
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (0, 2): 0.5, (1, 0): 0.25, (2, 0): 2.0, (2, 1): -1.0}
    return [
        Experience(
            eid=EID(batch=1, task=task, run=run, suffix=f"{task}-{run}"),
            tokens=torch.arange(5 + run),
            prompt_length=2,
            logprobs=-torch.arange(1.0, 4.0 + run) / 10,
            action_mask=torch.tensor([True, run != 1, True] + [True] * run),
            reward=reward,
        )
        for (task, run), reward in rewards.items()
    ]


def test_group_advantages_are_those_of_a_direct_call(folder: Path) -> None:
    config = configured(folder, advantage_fn="median").algorithm
    direct, _ = class_named("Median")(weight=3.0)(experiences())
    batch, metrics = estimate(ExperienceBatch.of(experiences()), config.estimator)
    assert batch.ids("uid") == [item.eid.uid for item in direct], "the group of one run is left out by the class"
    for item, wanted in zip(batch, direct, strict=True):
        assert wanted.advantages is not None
        assert wanted.action_mask is not None
        torch.testing.assert_close(item.advantages, wanted.advantages * wanted.action_mask)
    assert metrics["group_advantages/median/mean"] == pytest.approx((0.5 + 0.25 - 1.0) / 3)
    assert metrics["group_advantages/median/max"] == 0.5


def test_advantages_of_a_data_proto_are_those_of_a_direct_call(folder: Path) -> None:
    config = configured(folder, advantage_fn="whitened", advantage_fn_args={"gamma": 0.9}, repeat_times=1).algorithm
    batch, metrics = estimate(ExperienceBatch.of(experiences()), config.estimator)
    sources = experiences()
    masks = [item.action_mask for item in sources if item.action_mask is not None]
    rewards = torch.zeros(6, 5)
    for row, item in enumerate(sources):
        rewards[row, item.response_length - 1] = float(item.reward or 0.0)
    columns = {
        "token_level_rewards": rewards,
        "response_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
    }
    tensors = type("Tensors", (dict,), {"batch_size": (6,)})(columns)
    direct = SimpleNamespace(batch=tensors, non_tensor_batch={"uid": [item.eid.tid for item in sources]})
    class_named("Whitened")(gamma=0.9)(direct)
    for item, row, mask in zip(batch, direct.batch["advantages"], masks, strict=True):
        torch.testing.assert_close(item.advantages, row[: len(mask)])
    assert metrics["group_advantages/tasks"] == 3.0
    assert metrics["group_advantages/rows"] == 6.0


@pytest.mark.parametrize(
    ("shape", "metrics", "message"),
    [
        ("6", "{}", r"Skewed sets advantages or returns that cannot be used, wanted Tensors \[6, longest "),
        ("6, 5", "0.5", r"Skewed returns the metrics 0\.5, wanted numbers by name: TypeError"),
    ],
)
def test_advantages_of_a_wrong_form_are_one_error(folder: Path, shape: str, metrics: str, message: str) -> None:
    (folder / "class_forms_skewed.py").write_text(
        "import torch\n"
        "from trinity_mq.algorithms import ADVANTAGE_FN, AdvantageFn\n"
        '@ADVANTAGE_FN.register_module("skewed")\n'
        "class Skewed(AdvantageFn):\n"
        "    def __call__(self, exps, **kwargs):\n"
        f'        exps.batch["advantages"] = torch.zeros({shape})\n'
        f"        return exps, {metrics}\n"
    )
    add_plugins([str(folder)])
    config = configured(folder, advantage_fn="skewed", repeat_times=1).algorithm
    with pytest.raises(PluginError, match=message):
        estimate(ExperienceBatch.of(experiences()), config.estimator)


def test_a_registered_algorithm_sets_its_functions_below_the_users_settings(folder: Path) -> None:
    config = configured(folder, algorithm_type="centred_algorithm", policy_loss_fn_args={"tau": 4.0}).algorithm
    assert config.surrogate.kind == "class_forms_plugin.Centred"
    assert config.estimator.kind == "class_forms_plugin.Median"
    assert config.kl_loss is not None
    assert (config.kl_loss.kind, config.repeat_times) == ("class_forms_plugin.Cubic", 4)
    other = configured(folder, algorithm_type="centred_algorithm", repeat_times=2, kl_loss_fn="k2").algorithm
    assert other.kl is not None
    assert (other.repeat_times, other.kl.kind, other.kl_loss) == (2, "k2", None)


@pytest.mark.parametrize(
    ("body", "algorithm", "message"),
    [
        ("return logprob.sum()", {}, r"returns tensor.*, wanted a pair: a scalar Tensor, and metrics"),
        ("return logprob, {}", {}, r"wanted a pair: a scalar Tensor"),
        ("return logprob.detach().sum(), {}", {}, r"without a gradient: nothing would be learned"),
        (
            "value = logprob.exp(); value.mul_(value); return value.sum(), {}",
            {},
            r"gradient of pg_loss cannot be computed",
        ),
        ("raise KeyError('absent')", {}, r"class_forms_wrong\.Wrong raised KeyError"),
        ("return logprob.sum(), {}", {"policy_loss_fn_args": {"taw": 1}}, r"cannot be made with args .*taw"),
        (
            "return logprob.sum(), {}",
            {"correction": [{"kind": "divergence"}]},
            r"algorithm\.correction is set",
        ),
    ],
)
def test_a_class_that_returns_no_loss_is_one_error(
    folder: Path, body: str, algorithm: dict[str, Any], message: str
) -> None:
    (folder / "class_forms_wrong.py").write_text(
        "from trinity_mq.algorithms import POLICY_LOSS_FN, PolicyLossFn\n"
        '@POLICY_LOSS_FN.register_module("wrong")\n'
        "class Wrong(PolicyLossFn):\n"
        f"    def __call__(self, logprob, action_mask, **kwargs):\n        {body}\n"
    )
    add_plugins([str(folder)])
    config = configured(folder, policy_loss_fn="wrong", **algorithm).algorithm

    def use() -> None:
        load_classes(config)
        class_losses(step(), config, IS_EXPERT)

    with pytest.raises(PluginError, match=message):
        use()


def test_a_kl_may_pass_its_arguments_on(folder: Path) -> None:
    (folder / "class_forms_passing.py").write_text(
        "from class_forms_plugin import Cubic\n"
        "from trinity_mq.algorithms import KL_FN\n"
        '@KL_FN.register_module("passing")\n'
        "class Passing(Cubic):\n"
        "    def calculate_kl_loss(self, logprob, **kwargs):\n"
        "        return super().calculate_kl_loss(logprob, **kwargs)\n"
    )
    add_plugins([str(folder)])
    found = [
        class_losses(step(), configured(folder, **{**KL, "kl_loss_fn": name}).algorithm, IS_EXPERT).metrics["kl_loss"]
        for name in ("cubic", "passing")
    ]
    assert found[0] == found[1]


def test_a_function_in_the_place_of_a_class_is_named_with_what_is_wanted() -> None:
    config = LossConfig(kl_loss=PluginPiece(kind=f"{__name__}.step"))
    with pytest.raises(PluginError, match=r"step is <function.*, wanted a subclass of trinity_mq\.algorithms\.KLFn"):
        load_classes(config)


def test_a_missing_input_names_the_setting_that_adds_it(folder: Path) -> None:
    config = configured(folder, policy_loss_fn="mixed").algorithm
    view = step()
    with pytest.raises(PluginError, match=r"Mixed takes 'ref_logprob', and this step has .*surrogate\.reference: true"):
        class_losses(TokenView(**{**vars(view), "ref": None}), config, IS_EXPERT)
    with pytest.raises(PluginError, match=r"takes 'level', .*; give each experience a CustomField"):
        class_losses(TokenView(**{**vars(view), "custom": {}}), config, IS_EXPERT)
