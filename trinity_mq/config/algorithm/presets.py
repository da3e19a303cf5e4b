"""The algorithms by name: the pieces, purpose and source of each.

A preset contains only its differences from the defaults: advantages from the runs of a task, the sampler's logprobs as
anchor, the token's ratio, PPO's clip, no correction, no reference model, the mean over trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Pieces = Mapping[str, Any]

CLIP = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}
K2 = {"kind": "k2", "coef": 0.001}
SUPERVISED = {"rl": 0.0, "ce": 1.0}
SUPERVISED_LR = 2e-5
"""Learning rate for supervised answers: TRL's ``SFTConfig``."""
PAIR_LR = 5e-6
"""Learning rate for pairs: between TRL's ``DPOConfig`` (1e-6) and Llama 3 (1e-5, arXiv 2407.21783)."""


@dataclass(frozen=True)
class Preset:
    """One algorithm, as differences from the default pieces."""

    summary: str
    """Description in one line."""
    source: str
    """Paper or code that defines the algorithm."""
    loss: Pieces = field(default_factory=dict)
    """Fields of the loss that differ from the defaults."""
    formula: str = "max(-A r, -A clip(r, 1 - low, 1 + high)), where A < 0 at most dual |A|"
    """Loss of a token; r is the ratio, A the advantage, p the policy, sg stops the gradient."""
    estimator: Pieces = field(default_factory=lambda: _group(scale="group"))
    """Estimator of the advantages."""
    repeat_times: int = 8
    """Number of runs of a task, unless configured."""
    lr: float = 1e-6
    """Peak learning rate for all weights of a model, unless configured. Losses on sampled answers: 1e-6, as in TRL's
    ``GRPOConfig`` and ``RLOOConfig``."""
    differs: str = ""
    """Deliberate differences from Trinity-RFT 0.6, and surprises for a user of TRL or verl."""


def _group(**settings: Any) -> dict[str, Any]:
    return {"kind": "group", **settings}


def _decoupled(*rules: Mapping[str, Any]) -> dict[str, Any]:
    return {"anchor": "old", "surrogate": CLIP | {"high": 0.28, "dual": None}, "correction": rules}


NO_ADVANTAGE = {"kind": "none"}
LIKELIHOOD_FORMULA = "-log p"
LINEAR_FORMULA = "-A r, over the tokens that the correction keeps"
CLIP_DIFFERS = (
    "Groups of one have advantage 0; the mean is over all tokens of the optimizer step, not of a micro-batch."
)

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "Compares the rewards of a task's runs; PPO's clip with a higher upper bound.",
        "arXiv 2402.03300; clip range arXiv 2503.14476",
        estimator=_group(scale="group", epsilon=1e-4),
        differs=CLIP_DIFFERS + " No KL term: add kl to have one.",
    ),
    "dapo": Preset(
        "GRPO for long answers: clip-higher, token mean, dynamic sampling and a soft penalty of length as operators.",
        "arXiv 2503.14476",
        {"surrogate": CLIP | {"high": 0.28, "dual": 10.0}},
        estimator=_group(scale="group", std_threshold=0.0),
        repeat_times=16,
    ),
    "dr_grpo": Preset(
        "GRPO without the biases of length and difficulty: no division by the deviation, a constant divisor.",
        "arXiv 2503.20783; divisor: sail-sg/understand-r1-zero and TRL, loss_type dr_grpo",
        {"surrogate": CLIP, "reduction": {"kind": "sequence_constant"}},
        "max(-A r, -A clip(r, 1 - low, 1 + high)) / (answers x model.max_response_tokens)",
        estimator=_group(scale="none"),
        differs="The divisor counts the answers, as in the paper's code and TRL; answers without a trained token do "
        "not count.",
    ),
    "ppo": Preset(
        "Advantages from a learned value function (GAE).",
        "arXiv 1707.06347; GAE arXiv 1506.02438",
        {"surrogate": CLIP, "kl": K2},
        estimator={"kind": "gae", "gamma": 1.0, "lam": 1.0},
        repeat_times=1,
        differs="GAE skips masked tokens.",
    ),
    "reinforceplusplus": Preset(
        "Discounted rewards of each token, whitened over the batch; no groups.",
        "arXiv 2501.03262",
        {"surrogate": CLIP, "kl": K2},
        estimator={"kind": "discounted", "gamma": 1.0, "whiten": True},
        repeat_times=2,
        differs="Returns skip masked tokens. The KL is a term of the loss (k2, weight .001); verl and OpenRLHF take it "
        "from the reward of each token: set reward_kl for that, and kl: null. The runs of a task are not compared, so "
        "hard tasks have negative and easy tasks positive advantages: reinforceplusplus_baseline compares them.",
    ),
    "reinforceplusplus_baseline": Preset(
        "Rewards minus the mean of their group, whitened over the batch.",
        "arXiv 2501.03262",
        {"surrogate": CLIP},
        estimator=_group(scale="none", whiten=True),
    ),
    "rloo": Preset(
        "Rewards minus the mean of the other runs of the task.",
        "arXiv 2402.14740",
        {"surrogate": CLIP, "kl": K2},
        estimator=_group(baseline="leave_one_out", scale="none"),
        differs="Ratio and clip apply to each token, and the loss is the mean over tokens, as in verl. TRL takes the "
        "ratio of the whole answer and the mean over answers: set ratio: {kind: sequence_product}, surrogate: {dual: "
        "null} and reduction: {kind: sequence}. The KL is a term of the loss (k2, weight .001); TRL takes .05 of it "
        "from the reward, verl has none by default.",
    ),
    "rae": Preset(
        "Rewards minus the moving average of their role's: for games of several players, and of a policy with itself.",
        "arXiv 2506.24119; prime-rl",
        {"surrogate": CLIP},
        estimator=_group(baseline="role_mean", decay=0.95, scale="none"),
        repeat_times=1,
    ),
    "remax": Preset(
        "Rewards minus that of a greedy answer to the same task.",
        "arXiv 2310.10505",
        {"surrogate": CLIP},
        estimator=_group(baseline="greedy", scale="none"),
        repeat_times=2,
    ),
    "opmd": Preset(
        "Policy mirror descent without a ratio, held near a reference.",
        "Trinity-RFT, arXiv 2505.17826",
        {"surrogate": {"kind": "log_linear", "divisor": 2.0}, "kl": K2},
        "-A log p / (1 + tau)",
        estimator=_group(baseline="mean", scale="none"),
    ),
    "asymre": Preset(
        "A baseline below the mean of the group, so that good runs weigh more: safe on old data.",
        "arXiv 2506.20520",
        {"surrogate": {"kind": "log_linear", "divisor": 2.0}},
        "-A log p / (1 + tau)",
        estimator=_group(baseline="mean", shift=-0.1, scale="none"),
    ),
    "topr": Preset(
        "Good answers at full weight, bad ones by their truncated ratio.",
        "arXiv 2503.14286",
        {"surrogate": {"kind": "truncate", "cap": 1.0, "only": "negative"}, "kl": K2},
        "-sg[a] A log p, a = 1 where A > 0, else r within 0 and 1",
        estimator=_group(baseline="none", scale="none"),
    ),
    "cispo": Preset(
        "Truncates the weight and keeps the gradient of every token.",
        "arXiv 2506.13585",
        {"surrogate": {"kind": "truncate", "cap": 1.28}},
        "-sg[min(r, cap)] A log p",
        differs="No KL term: add kl to have one. The cap is the largest ratio itself, as TRL's epsilon_high; ScaleRL's "
        "is 5 (surrogate: {cap: 5}). In verl the cap is 1 + clip_ratio_high, and 1 - clip_ratio_low is a floor "
        "(surrogate: {floor: 0.8}). The ratio is against the sampler's logprobs, not against recomputed ones (anchor: "
        "old).",
    ),
    "gspo": Preset(
        "The ratio of the whole answer, to the power of one over its length.",
        "arXiv 2507.18071",
        {
            "ratio": {"kind": "sequence"},
            "surrogate": {"kind": "clip", "low": 3e-4, "high": 4e-4, "dual": None},
            "reduction": {"kind": "sequence"},
        },
        "max(-A s, -A clip(s, 1 - low, 1 + high)) with s = exp(mean log r) of the answer",
        differs="No KL term: add kl to have one. On data of older weights take a wider range (.2 and .28).",
    ),
    "sapo": Preset(
        "A soft gate instead of the clip: the further from the sampler, the smaller the gradient.",
        "arXiv 2511.20347",
        {"surrogate": {"kind": "gate"}, "reduction": {"kind": "sequence"}},
        "-A 4/tau sigmoid(tau (r - 1))",
        differs="The gradient flows through the gate; a detached one grows with r.",
    ),
    "gmpo": Preset(
        "The geometric mean of the token ratios of an answer, each clipped.",
        "arXiv 2507.20673",
        {"ratio": {"kind": "geometric"}, "surrogate": {"kind": "linear"}, "reduction": {"kind": "sequence"}},
        "-A exp(mean clip(log r, -low, high))",
    ),
    "luspo": Preset(
        "GSPO without its preference of short answers: each answer weighs by its length.",
        "arXiv 2602.05261",
        {"ratio": {"kind": "sequence_mean"}, "surrogate": CLIP, "reduction": {"kind": "sequence_sum"}},
        "length max(-A s, -A clip(s)) with s = exp(mean log r) of the answer",
    ),
    "vespo": Preset(
        "A smooth weight of the whole answer's ratio that falls on both sides of 1.",
        "arXiv 2602.10693",
        {"ratio": {"kind": "sequence_product"}, "surrogate": {"kind": "vespo"}},
        "-sg[e^l s^k e^(-l s)] A log p with s the product of the ratios",
    ),
    "max_rl": Preset(
        "Divides by the mean reward of the group: hard tasks weigh more, towards maximum likelihood.",
        "arXiv 2602.02710",
        {"surrogate": CLIP},
        estimator=_group(scale="mean"),
    ),
    "gpg": Preset(
        "The plain policy gradient with the mean of the group as baseline, scaled up for groups without signal.",
        "arXiv 2504.02546",
        {"surrogate": {"kind": "log_linear"}},
        "-A log p",
        estimator=_group(scale="none", nonzero_scale=True),
    ),
    "opo": Preset(
        "The baseline of least variance: rewards weighted by the length of their answers.",
        "arXiv 2505.23585",
        {"surrogate": CLIP},
        estimator=_group(baseline="length_weighted", scale="none"),
    ),
    "passk": Preset(
        "The best run of a task against the second best: trains for one right answer among many.",
        "arXiv 2503.19595",
        {"surrogate": CLIP},
        estimator=_group(baseline="second_best", scale="group"),
    ),
    "rec": Preset(
        "The policy gradient over the tokens that PPO's clip keeps, with the ratio as constant weight.",
        "arXiv 2509.24203",
        {"surrogate": {"kind": "log_linear", "keep": "one_side", "weight": "ratio"}},
        "-sg[r] A log p where PPO's clip lets the gradient through",
        estimator=_group(scale="none"),
        differs="Groups of one and every combination of weight and range work.",
    ),
    "sppo": Preset(
        "The log ratio itself, within a range: a simple form of policy optimisation.",
        "arXiv 2108.05828",
        {"surrogate": {"kind": "log_ratio"}},
        "-A log r where 1/(1 + e) <= r <= 1 + e",
        estimator=_group(baseline="mean", scale="none"),
    ),
    "multi_step_grpo": Preset(
        "GRPO over the last reward of each run, given to all of its steps.",
        "arXiv 2402.03300; Trinity-RFT, arXiv 2505.17826",
        differs=CLIP_DIFFERS + " grpo does this too: statistics are over runs.",
    ),
    "gigpo": Preset(
        "GRPO over runs and, within a task, over the steps that were taken in the same state.",
        "arXiv 2505.10978",
        {"surrogate": CLIP},
        estimator={"kind": "gigpo"},
        differs="States of different tasks are never compared.",
    ),
    "importance_sampling": Preset(
        "The ratio without any clip: unbiased, and of high variance on old data.",
        "arXiv 2110.00641, without its clip",
        {"surrogate": {"kind": "linear"}},
        "-A r",
    ),
    "ipo": Preset(
        "No clip; tokens whose probability moved by more than .3 are left out, whatever their advantage.",
        "prime-rl, September 2026",
        {"surrogate": {"kind": "linear"}, "correction": [{"kind": "divergence", "bound": 0.3, "signed": False}]},
        LINEAR_FORMULA,
        estimator=_group(scale="none"),
    ),
    "dppo": Preset(
        "No clip; tokens whose probability moved by more than .2 in the direction of their advantage are left out.",
        "arXiv 2602.04879",
        {"surrogate": {"kind": "linear"}, "correction": [{"kind": "divergence", "bound": 0.2}]},
        LINEAR_FORMULA,
    ),
    "decoupled": Preset(
        "Clips against the policy at the start of the train step; truncated weights correct for the sampler.",
        "arXiv 2110.00641; arXiv 2505.24298",
        _decoupled({"kind": "weight", "high": 2.0}),
        "w max(-A r, -A clip(r)) with r = p / old and w = min(old / mu, 2)",
    ),
    "decoupled_loglinear": Preset(
        "The decoupled loss without a second forward pass: the old policy is interpolated by the age of the token.",
        "arXiv 2512.06547",
        _decoupled({"kind": "weight", "high": 5.0, "beyond": "mask"}) | {"anchor": "loglinear"},
        "w max(-A r, -A clip(r)) with r = p / old and w = old / mu up to 5",
    ),
    "icepop": Preset(
        "The decoupled loss; tokens on which trainer and engine disagree by more than .5 to 5 are left out.",
        "arXiv 2510.18855",
        _decoupled({"kind": "weight", "low": 0.5, "high": 5.0, "beyond": "mask"}),
        "w max(-A r, -A clip(r)) with r = p / old and w = old / mu within .5 and 5, else 0",
    ),
    "m2po": Preset(
        "No clip; the tokens of largest squared log ratio are left out until their mean is within .04.",
        "arXiv 2510.01161",
        {"surrogate": {"kind": "linear"}, "correction": [{"kind": "second_moment", "bound": 0.04}]},
        LINEAR_FORMULA,
    ),
    "opsm": Preset(
        "GRPO without the bad answers that the policy has left behind.",
        "DeepSeek-V3.2, arXiv 2512.02556",
        {"correction": [{"kind": "sequence_mask", "bound": 0.1}]},
    ),
    "kl_cov": Preset(
        "Keeps the entropy up: a KL penalty on the few tokens whose logprob and advantage covary most.",
        "arXiv 2505.22617",
        {"surrogate": {"kind": "linear"}, "regularisers": [{"kind": "covariance"}]},
        "-A r, + |log r| on the tokens of highest covariance",
    ),
    "clip_cov": Preset(
        "Keeps the entropy up: leaves out a few tokens whose logprob and advantage covary much.",
        "arXiv 2505.22617",
        {"surrogate": CLIP, "correction": [{"kind": "covariance_clip"}]},
    ),
    "clip_b": Preset(
        "Keeps the entropy up: leaves out bad tokens that would lower it most.",
        "arXiv 2602.03392",
        {"surrogate": CLIP, "correction": [{"kind": "entropy_clip"}]},
    ),
    "clip_v": Preset(
        "Keeps the entropy up: leaves out the few bad tokens that would lower it most, by the whole vocabulary.",
        "arXiv 2602.03392",
        {"surrogate": CLIP, "correction": [{"kind": "vocabulary_clip"}]},
        differs="Tokens of advantage 0 are never left out.",
    ),
    "on_policy_distill": Preset(
        "Follows a teacher's logprobs on the student's own samples, token by token; rewards have no part.",
        "arXiv 2306.13649",
        estimator={"kind": "distill", "kl_coef": 1.0},
    ),
    "jsd": Preset(
        "On-policy distillation by the Jensen-Shannon divergence.",
        "arXiv 2306.13649",
        estimator={"kind": "jsd", "beta": 0.5, "kl_coef": 1.0},
        differs="The advantage is the divergence's own gradient; upstream's is symmetric in student and teacher.",
    ),
    "distill": Preset(
        "On-policy distillation as a loss: the live policy's logprob is in the signal.",
        "arXiv 2306.13649; prime-rl",
        {"weights": {"rl": 0.0, "ref_kl": 1.0}},
        "-sg[log teacher - log p] r",
        estimator=NO_ADVANTAGE,
    ),
    "sft": Preset(
        "Supervised training on given answers.",
        "maximum likelihood",
        {"weights": SUPERVISED},
        LIKELIHOOD_FORMULA,
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        lr=SUPERVISED_LR,
    ),
    "cpt": Preset(
        "Continued pre-training: as sft, on texts whose prompt is their first token.",
        "maximum likelihood",
        {"weights": SUPERVISED},
        LIKELIHOOD_FORMULA,
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        lr=SUPERVISED_LR,
    ),
    "raft": Preset(
        "Supervised training on the sampled answers that an operator accepted.",
        "arXiv 2304.06767",
        {"weights": SUPERVISED},
        LIKELIHOOD_FORMULA,
        estimator=NO_ADVANTAGE,
        lr=SUPERVISED_LR,
    ),
    "sft_is": Preset(
        "Supervised training weighted by the policy's own probability of each token.",
        "arXiv 2508.11408",
        {"weights": SUPERVISED, "imitation": {"weight": "probability"}},
        "-sg[p] log p",
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        lr=SUPERVISED_LR,
    ),
    "sft_phi": Preset(
        "Supervised training that leaves alone what the policy is sure of, or far from.",
        "arXiv 2508.11408",
        {"weights": SUPERVISED, "imitation": {"weight": "uncertainty"}},
        "-sg[p (1 - p)] log p",
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        lr=SUPERVISED_LR,
    ),
    "mix": Preset(
        "Sampled answers by GRPO and expert answers by their likelihood, each over its own tokens.",
        "Trinity-RFT, arXiv 2505.17826",
        {"surrogate": CLIP, "weights": {"rl": 0.9, "ce": 0.1}},
        "(1 - mu) clip loss of sampled answers + mu (-log p) of expert answers",
        differs="Each part is the mean over its own tokens of the whole optimizer step.",
    ),
    "mix_chord": Preset(
        "As mix, with a weight of imitation that falls over the run and leaves sure tokens alone.",
        "arXiv 2508.11408",
        {"surrogate": CLIP, "imitation": {"weight": "uncertainty"}, "ce_schedule": {"peak": 0.1, "valley": 0.1}},
        "(1 - mu(step)) clip loss of sampled answers + mu(step) (-sg[p (1 - p)] log p) of expert answers",
        differs="Each part is the mean over its own tokens of the whole optimizer step.",
    ),
    "dpo": Preset(
        "Pairs of a chosen and a rejected answer, against a reference model.",
        "arXiv 2305.18290",
        {"weights": {"rl": 0.0, "pair": 1.0}, "pair": {"form": "sigmoid"}},
        "-log sigmoid(beta (log ratio to ref of the chosen - that of the rejected))",
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        differs="One logit for each pair, and no KL term beside it.",
        lr=PAIR_LR,
    ),
    "ipo_pref": Preset(
        "Pairs by a squared distance, which does not overfit certain preferences as DPO does.",
        "arXiv 2310.12036",
        {"weights": {"rl": 0.0, "pair": 1.0}, "pair": {"form": "ipo"}},
        "(mean log ratio of the chosen - that of the rejected - 1 / (2 beta))^2",
        estimator=NO_ADVANTAGE,
        repeat_times=1,
        lr=PAIR_LR,
    ),
}
"""Presets by the name in ``algorithm.algorithm_type``."""

ALIASES = {"grpo_verl": "grpo"}
"""Names of presets, by the name that another library gives the same algorithm."""
