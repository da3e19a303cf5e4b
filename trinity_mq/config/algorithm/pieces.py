"""The pieces of a loss, as configuration: ratio, surrogate, corrections, regularisers and reduction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from trinity_mq.config.base import Section

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Piece(Section):
    """One piece of an algorithm, chosen by its ``kind``."""

    kind: str
    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs of the piece besides tokens, engine logprobs and advantages: ``old``, ``ref``, ``teacher``, ``entropy``,
    ``entropy_baseline``, ``staleness``."""


class PluginPiece(Piece):
    """A user-defined function or class, imported by its dotted path."""

    kind: str
    """``package.module.function``. The module must be on the Python path or in ``plugin_dirs``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class's constructor."""

    @field_validator("kind")
    @classmethod
    def _dotted(cls, value: str) -> str:
        if not DOTTED.fullmatch(value):
            raise ValueError(f"{value!r} is not a known kind, wanted a known kind or the dotted path of a function")
        return value


class SurrogatePlugin(PluginPiece):
    """A user-defined surrogate: a function of log ratios, logprobs and advantages, or a class in Trinity-RFT's form
    (``PolicyLossFn``), which computes the loss of all tokens of an optimizer step.
    """

    reference: bool = False
    """Whether the class takes the reference model's logprobs (``ref_logprob``). If ``policy_loss_fn`` names a class
    that a module in ``plugin_dirs`` registers, the parameters of the class determine this value.
    """


def _by_kind(*kinds: str) -> Discriminator:
    """Return the discriminator of a union: the member named by ``kind`` if it is one of ``kinds``, otherwise the
    plug-in.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        if kind in kinds:
            return str(kind)
        return "plugin" if isinstance(kind, str) and "." in kind else None

    return Discriminator(
        tag,
        custom_error_type="unknown_kind",
        custom_error_message=(
            f"kind is not one of {', '.join(kinds)}, and not the dotted path of a function of your own"
        ),
    )


# Ratios: the log ratio of each token between the policy and its anchor


class TokenRatio(Piece):
    """``log pi - log anchor`` of each token (PPO, arXiv 1707.06347)."""

    kind: Literal["token"] = "token"


class SequenceRatio(Piece):
    """The mean log ratio of the token's sequence. Its gradient is the token's own gradient times the sequence's ratio
    (GSPO's token form, arXiv 2507.18071, equation 14).
    """

    kind: Literal["sequence"] = "sequence"


class SequenceMeanRatio(Piece):
    """The mean log ratio of the token's sequence, with the gradient of the mean (GSPO, arXiv 2507.18071, equation
    7).
    """

    kind: Literal["sequence_mean"] = "sequence_mean"


class SequenceProductRatio(Piece):
    """The sum of the log ratios of the token's sequence: the ratio of the whole answer. On long answers sampled by
    older weights it soon becomes extreme.
    """

    kind: Literal["sequence_product"] = "sequence_product"


class GeometricRatio(Piece):
    """The mean over the sequence of the log ratios, each clipped against the sign of the advantage (GMPO, arXiv
    2507.20673).
    """

    kind: Literal["geometric"] = "geometric"
    low: float = Field(default=0.4, gt=0)
    """Log ratios are clipped below the negative of this value."""
    high: float = Field(default=0.4, gt=0)
    """Log ratios are clipped above this value."""


class SelfRatio(Piece):
    """Ratio 1 with the policy's own gradient: the plain policy gradient, independent of the policy that sampled."""

    kind: Literal["self"] = "self"


Ratio = Annotated[
    TokenRatio | SequenceRatio | SequenceMeanRatio | SequenceProductRatio | GeometricRatio | SelfRatio,
    Field(discriminator="kind"),
]

# Surrogates: from ratio, logprob and advantage to a loss per token


class Clip(Piece):
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, limited to ``dual |A|`` if ``A < 0`` (PPO, arXiv 1707.06347,
    equation 7; dual clip, arXiv 1912.09729, equation 5).
    """

    kind: Literal["clip"] = "clip"
    low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below 1 minus this value."""
    high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above 1 plus this value."""
    dual: float | None = Field(default=3.0, gt=1)
    """If the advantage is negative, a ratio above this value has no gradient. Null: no such limit."""


class Truncate(Piece):
    """``-sg[clip(r, floor, cap)] A log pi``: a truncated token keeps a gradient (CISPO, arXiv 2506.13585, equations 4
    and 5; with ``only: negative`` the taper of TOPR, arXiv 2503.14286).
    """

    kind: Literal["truncate"] = "truncate"
    floor: float = Field(default=0.0, ge=0)
    """Minimum weight."""
    cap: float = Field(default=1.28, gt=0)
    """Maximum weight."""
    only: Literal["all", "negative"] = "all"
    """``negative``: tokens whose advantage is above ``threshold`` have weight 1."""
    threshold: float = 0.0
    """Advantage above which a token counts as positive."""
    mask_low: float | None = Field(default=None, gt=0, le=1)
    """Drop tokens with ``A < 0`` and a ratio below 1 minus this value."""
    mask_high: float | None = Field(default=None, gt=0)
    """Drop tokens with ``A > 0`` and a ratio above 1 plus this value."""


class SigmoidGate(Piece):
    """``-A 4/tau sigmoid(tau (r - 1))``: a soft clip whose gradient decreases on both sides of 1 (SAPO, arXiv
    2511.20347).
    """

    kind: Literal["gate"] = "gate"
    positive: float = Field(default=1.0, gt=0)
    """``tau`` for positive advantages."""
    negative: float = Field(default=1.05, gt=0)
    """``tau`` for all other advantages."""


class Linear(Piece):
    """``-A r``: importance sampling without a clip."""

    kind: Literal["linear"] = "linear"
    cap: float | None = Field(default=None, gt=0)
    """A ratio above this value is replaced by this value, as a constant weight of the logprob. Null: no limit."""


class LogLinear(Piece):
    """``-A w log pi``: the policy gradient over selected tokens with a constant weight (REC, arXiv 2509.24203;
    OPMD).
    """

    kind: Literal["log_linear"] = "log_linear"
    weight: Literal["none", "ratio", "advantage"] = "none"
    """``ratio``: ``sg[r]``; ``advantage``: ``exp(A / temperature)``."""
    keep: Literal["all", "one_side", "two_side", "ring"] = "all"
    """Selection of tokens. ``one_side``: the tokens to which PPO's clip leaves a gradient. ``two_side``: ``r`` within
    the range. ``ring``: ``r`` within the range, or so far outside it, against the advantage, that the token matters
    again."""
    low: float = Field(default=0.2, gt=0)
    """The range begins at 1 minus this value."""
    high: float = Field(default=0.2, gt=0)
    """The range ends at 1 plus this value."""
    outer_low: float = Field(default=0.6, gt=0)
    """ring: a token of positive advantage is also kept below 1 minus this value."""
    outer_high: float = Field(default=2.0, gt=0)
    """ring: a token of negative advantage is also kept above 1 plus this value."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the weight ``advantage``."""
    divisor: float = Field(default=1.0, gt=0)
    """The loss is divided by this value; ``1 + tau`` for OPMD."""


class LogRatio(Piece):
    """``-A log(pi / anchor)`` where ``1 / (1 + epsilon) <= r <= 1 + epsilon``, else 0 (SPPO, arXiv 2108.05828)."""

    kind: Literal["log_ratio"] = "log_ratio"
    epsilon: float = Field(default=0.3, gt=0)
    """Width of the range of the ratio, from ``1 / (1 + epsilon)`` to ``1 + epsilon``."""


class Quadratic(Piece):
    """``-A log pi + beta / 2 log(pi / anchor)^2`` (DRO, arXiv 2405.19107)."""

    kind: Literal["quadratic"] = "quadratic"
    beta: float = Field(default=0.1, ge=0)
    """Weight of the square."""


class Vespo(Piece):
    """``-A sg[w] log pi`` with ``w = e^l r^k e^(-l r)``, where ``r`` is the ratio of the sequence (VESPO, arXiv
    2602.10693).
    """

    kind: Literal["vespo"] = "vespo"
    positive_power: float = Field(default=2.0, gt=0)
    """``k`` for advantages of at least 0."""
    positive_rate: float = Field(default=3.0, gt=0)
    """``l`` for advantages of at least 0."""
    negative_power: float = Field(default=3.0, gt=0)
    """``k`` for negative advantages."""
    negative_rate: float = Field(default=2.0, gt=0)
    """``l`` for negative advantages."""


class Likelihood(Piece):
    """``-w log pi``: supervised training (SFT), with the weights of CHORD (arXiv 2508.11408)."""

    kind: Literal["likelihood"] = "likelihood"
    weight: Literal["none", "probability", "uncertainty"] = "none"
    """Factor ``w`` of a token of probability ``p``, without gradient. ``none``: 1; ``probability``: ``p``;
    ``uncertainty``: ``p (1 - p)``."""
    cutoff: float = Field(default=1.0, gt=0, le=1)
    """Maximum probability: a token with a higher probability has no gradient."""


class Distill(Piece):
    """``-sg[log teacher - log pi] pi / mu``: reverse KL to a teacher, with the live policy's logprob in the signal.
    This term is 0 for tokens whose probability fell by more than ``bound`` since they were sampled.
    """

    kind: Literal["distill"] = "distill"
    needs: ClassVar[tuple[str, ...]] = ("teacher",)
    bound: float = Field(default=0.2, gt=0, le=1)
    """Maximum fall of a probability."""
    square: float = Field(default=0.001, ge=0)
    """Weight of the additional term ``log(pi / mu)^2``, on all tokens."""


class Pair(Piece):
    """A chosen and a rejected answer to one prompt: DPO (arXiv 2305.18290, equation 7) or IPO (arXiv 2310.12036)."""

    kind: Literal["pair"] = "pair"
    needs: ClassVar[tuple[str, ...]] = ("ref",)
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """``sigmoid``: DPO, over sums of log ratios. ``ipo``: squared distance of the difference of mean log ratios from
    ``1 / (2 beta)``."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the implicit rewards."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a label is wrong (conservative DPO)."""


Surrogate = Annotated[
    Annotated[Clip, Tag("clip")]
    | Annotated[Truncate, Tag("truncate")]
    | Annotated[SigmoidGate, Tag("gate")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[LogLinear, Tag("log_linear")]
    | Annotated[LogRatio, Tag("log_ratio")]
    | Annotated[Quadratic, Tag("quadratic")]
    | Annotated[Vespo, Tag("vespo")]
    | Annotated[SurrogatePlugin, Tag("plugin")],
    _by_kind("clip", "truncate", "gate", "linear", "log_linear", "log_ratio", "quadratic", "vespo"),
]

# Corrections: a constant weight for each token; 0 leaves the token out


class ImportanceWeight(Piece):
    """The bounded ratio of the old policy to the sampler. If the anchor is the sampler, it is the ratio of the trained
    policy to the sampler.

    With ``beyond: truncate`` it is truncated importance sampling. With ``beyond: mask`` it is IcePop (arXiv 2510.18855)
    by token, and masked importance sampling by sequence.
    """

    kind: Literal["weight"] = "weight"
    level: Literal["token", "sequence", "geometric"] = "token"
    """``token``: ratio of each token. ``sequence``: product of the sequence's ratios. ``geometric``: their geometric
    mean."""
    low: float | None = Field(default=None, gt=0)
    """Minimum weight. Null: no minimum."""
    high: float | None = Field(default=2.0, gt=0)
    """Maximum weight. Null: no maximum."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """Weight outside the bounds: the bound itself (``truncate``), or 0 (``mask``)."""
    normalize: bool = False
    """Divide by the mean weight of the optimizer step."""

    @property
    def over_step(self) -> bool:
        """Whether all tokens of the optimizer step are needed at once."""
        return self.normalize


class Reject(Piece):
    """Leaves out tokens or sequences on which the policies disagree, by the k1, k2 or k3 estimate of their divergence.

    Let ``x`` be the log of the ratio, as in ``ImportanceWeight``. k1 is ``-x``; its bounds apply to the inverse ratio,
    ``low <= exp(-x) <= high``. k2, ``x^2 / 2``, and k3, ``e^x - 1 - x``, must be at most ``high``
    (http://joschu.net/blog/kl-approx.html).
    """

    kind: Literal["reject"] = "reject"
    estimate: Literal["k1", "k2", "k3"] = "k1"
    """The estimate of the divergence."""
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Unit that is judged: the token, or the sequence by the sum, the mean or the maximum over its tokens."""
    low: float = Field(default=0.5, gt=0)
    """k1: minimum inverse ratio that is kept."""
    high: float = Field(default=2.0, gt=0)
    """Maximum inverse ratio (k1) or estimate (k2, k3) that is kept."""


class Divergence(Piece):
    """Leaves out tokens whose probability differs from the sampler's by more than ``bound`` (DPPO, arXiv 2602.04879;
    with ``signed: false`` IPO of prime-rl).
    """

    kind: Literal["divergence"] = "divergence"
    measure: Literal["tv", "kl"] = "tv"
    """``tv``: difference of the two probabilities; ``kl``: KL of the two Bernoulli distributions, in nats."""
    bound: float = Field(default=0.2, gt=0)
    """Maximum divergence that is kept."""
    signed: bool = True
    """Leave out tokens only in the direction of the advantage: upwards for a positive, downwards for a negative
    advantage."""


class SecondMoment(Piece):
    """Keeps the tokens with the smallest squared log ratio ``x``, as many as possible while the mean square of the kept
    tokens is at most ``bound``. It judges the tokens with ``A x > 0`` (``active``), or all tokens, over the whole
    optimizer step (M2PO, arXiv 2510.01161). ``x`` is the log of the ratio as in ``ImportanceWeight``.
    """

    kind: Literal["second_moment"] = "second_moment"
    bound: float = Field(default=0.04, gt=0)
    """Maximum second moment."""
    active: bool = True
    """Judge only the tokens whose ratio moves in the direction of their advantage, and keep all others."""


class OffPolicySequenceMask(Piece):
    """Leaves out sequences of negative advantage whose mean logprob fell by more than ``bound`` since they were sampled
    (DeepSeek-V3.2, arXiv 2512.02556, equation 9).
    """

    kind: Literal["sequence_mask"] = "sequence_mask"
    bound: float = Field(default=0.1, gt=0)
    """Maximum mean of ``log mu - log pi``, in nats."""
    against: Literal["anchor", "mu"] = "mu"
    """Policy with which the trained policy is compared: the ratio's anchor, or the sampler."""


class StalenessWeight(Piece):
    """Weighs a sequence by ``decay`` to the power of the age of its oldest token in train steps."""

    kind: Literal["staleness"] = "staleness"
    needs: ClassVar[tuple[str, ...]] = ("staleness",)
    decay: float = Field(default=0.9, gt=0, le=1)
    """Factor for each train step of age."""


class EntropyClip(Piece):
    """Leaves out the tokens of negative advantage that would change the entropy most: tokens with ``S - mean S`` below
    ``-bound`` standard deviations, where ``S = p (H + log p)``, over the optimizer step (Clip-B, arXiv 2602.03392).
    """

    kind: Literal["entropy_clip"] = "entropy_clip"
    needs: ClassVar[tuple[str, ...]] = ("entropy",)
    bound: float = Field(default=2.5, gt=0)
    """Bound, in standard deviations."""


class VocabularyClip(Piece):
    """Leaves out the tokens of negative advantage that would lower the entropy most, compared with the whole
    vocabulary: tokens with ``E S - S`` above ``bound`` standard deviations of ``E S - S`` over the optimizer step,
    where ``S = p (H + log p)`` and ``E S`` is its expectation over the vocabulary (Clip-V, arXiv 2602.03392).
    """

    kind: Literal["vocabulary_clip"] = "vocabulary_clip"
    needs: ClassVar[tuple[str, ...]] = ("entropy", "entropy_baseline")
    bound: float = Field(default=8.5, gt=0)
    """Bound, in standard deviations."""
    share: float = Field(default=0.0001, gt=0, le=1)
    """Maximum share of the trained tokens that is left out, farthest above the bound first; at least one token may be.
    """


class CovarianceClip(Piece):
    """Leaves out a few tokens, drawn at random from the tokens whose logprob and advantage covary strongly (Clip-Cov,
    arXiv 2505.22617).
    """

    kind: Literal["covariance_clip"] = "covariance_clip"
    share: float = Field(default=0.0002, gt=0, le=1)
    """Number of tokens left out, as a share of all trained tokens: at least one token, at most all candidates."""
    low: float = 1.0
    """Only tokens with a covariance above this value are candidates."""
    high: float = 5.0
    """Only tokens with a covariance below this value are candidates."""


Correction = Annotated[
    Annotated[ImportanceWeight, Tag("weight")]
    | Annotated[Reject, Tag("reject")]
    | Annotated[Divergence, Tag("divergence")]
    | Annotated[SecondMoment, Tag("second_moment")]
    | Annotated[OffPolicySequenceMask, Tag("sequence_mask")]
    | Annotated[StalenessWeight, Tag("staleness")]
    | Annotated[EntropyClip, Tag("entropy_clip")]
    | Annotated[VocabularyClip, Tag("vocabulary_clip")]
    | Annotated[CovarianceClip, Tag("covariance_clip")]
    | Annotated[PluginPiece, Tag("plugin")],
    _by_kind(
        "weight",
        "reject",
        "divergence",
        "second_moment",
        "sequence_mask",
        "staleness",
        "entropy_clip",
        "vocabulary_clip",
        "covariance_clip",
    ),
]

OVER_STEP = (SecondMoment, EntropyClip, VocabularyClip, CovarianceClip)
"""Corrections that need all tokens of the optimizer step at once."""

# Regularisers


class ReferenceKL(Piece):
    """A term that holds the policy near a reference model (estimators of http://joschu.net/blog/kl-approx.html)."""

    needs: ClassVar[tuple[str, ...]] = ("ref",)
    kind: Literal["k1", "k2", "k3", "k3_clamped", "abs", "k3_weighted", "k3_k2"] = "k2"
    """Estimate of the KL. With ``d = log pi - log ref``: ``k1`` is ``d``. ``k2`` is ``d^2 / 2`` (as a loss it has the
    gradient of the reverse KL). ``k3`` is ``e^-d - 1 + d``. ``k3_clamped`` is k3 limited to +-10. ``abs`` is ``|d|``.
    ``k3_weighted`` is k3 times the ratio, which is limited to at most 2 (DeepSeek-V3.2). ``k3_k2`` has the value of k3
    with the gradient of k2."""
    coef: float = Field(default=0.001, ge=0)
    """Weight of the term."""


class CovarianceKL(Piece):
    """``coef |log(pi / anchor)|`` on the share of tokens whose logprob and advantage covary most (KL-Cov, arXiv
    2505.22617).
    """

    kind: Literal["covariance"] = "covariance"
    share: float = Field(default=0.0002, gt=0, le=1)
    """Share of the trained tokens; at least one token."""
    coef: float = Field(default=1.0, ge=0)
    """Weight of the term."""


class SquaredLogRatio(Piece):
    """``coef log(pi / anchor)^2``: holds the policy near the anchor, by default the policy that sampled (Kimi k1.5,
    arXiv 2501.12599).
    """

    kind: Literal["square"] = "square"
    coef: float = Field(default=0.001, ge=0)
    """Weight of the term."""


class NegativeLikelihood(Piece):
    """``-coef log pi`` on all trained tokens: forward KL to the sampler (REC, arXiv 2509.24203)."""

    kind: Literal["likelihood"] = "likelihood"
    coef: float = Field(default=0.1, ge=0)
    """Weight of the term."""


Regulariser = Annotated[CovarianceKL | SquaredLogRatio | NegativeLikelihood, Field(discriminator="kind")]

# Reduction


class Reduction(Piece):
    """The reduction of token losses to a sum. A token's scale follows from counts of the whole optimizer step."""

    kind: Literal["token", "token_sum", "sequence", "sequence_sum", "sequence_constant", "constant", "prompt"] = "token"
    """``token``: mean over trained tokens (DAPO). ``sequence``: mean over sequences of their token means.
    ``sequence_sum``: mean over sequences of their token sums. ``sequence_constant``: ``sequence_sum`` divided by
    ``constant`` (Dr. GRPO, arXiv 2503.20783, as in its authors' code and TRL). ``constant``: sum divided by
    ``constant``; it grows with the number of sequences. ``prompt``: mean over tasks of their token means.
    ``token_sum``: the plain sum."""
    constant: float | None = Field(default=None, gt=0)
    """Divisor of ``constant`` and ``sequence_constant``. None: ``model.max_response_tokens``."""

    @model_validator(mode="after")
    def _constant(self) -> Reduction:
        if self.constant is not None and self.kind not in {"constant", "sequence_constant"}:
            raise ValueError(
                f"reduction.kind is {self.kind} and constant {self.constant}: only constant and sequence_constant have "
                "a constant; remove it"
            )
        return self


class Schedule(Section):
    """A weight over train steps: it rises linearly from 0 to ``peak``, then follows a cosine to ``valley``."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of train steps of the rise."""
    decay_steps: int = Field(default=0, ge=0)
    """Number of train steps of the fall, which follows the rise. 0: the weight stays at ``peak``."""
    peak: float = Field(default=0.1, ge=0, le=1)
    """Weight after the rise."""
    valley: float = Field(default=0.1, ge=0, le=1)
    """Weight after the fall."""


Anchor = Literal["mu", "old", "loglinear", "linear"]
"""The divisor of the ratio, as logprobs: ``mu``, the sampler's; ``old``, computed with the policy at the start of the
train step by a further forward pass; or an interpolation between the sampler and the trained policy by the age of the
token, without a further forward pass: ``loglinear`` of the logprobs (arXiv 2512.06547), ``linear`` of the
probabilities."""
BY_AGE = frozenset({"loglinear", "linear"})
"""Anchors that need the age of each token."""

KINDS = {name: get_args(get_args(union)[0]) for name, union in (("surrogate", Surrogate), ("correction", Correction))}
"""Members of the unions that also accept a plug-in."""


class ComponentWeights(Section):
    """Weights of the components of a loss, each reduced over its own tokens."""

    rl: float = Field(default=1.0, ge=0)
    """Weight of sampled answers, trained by ratio, surrogate and corrections."""
    ce: float = Field(default=0.0, ge=0)
    """Weight of answers to imitate, trained by their likelihood."""
    ref_kl: float = Field(default=0.0, ge=0)
    """Weight of sampled answers, trained towards a teacher."""
    pair: float = Field(default=0.0, ge=0)
    """Weight of pairs of a chosen and a rejected answer."""


class LossConfig(Section):
    """The loss of an algorithm, piece by piece."""

    anchor: Anchor = "mu"
    """Logprobs by which the ratio divides. ``mu``: the sampler's. ``old``: the policy's at the start of the train step.
    ``loglinear``: an interpolation between the sampler's and the trained policy's by the token's age, without a further
    forward pass. ``linear``: the same interpolation of probabilities instead of logprobs, so that the anchor of a token
    that became likely is higher."""
    ratio: Ratio = Field(default_factory=TokenRatio)
    """Ratio between policy and anchor."""
    surrogate: Surrogate = Field(default_factory=Clip)
    """Loss of a token, computed from ratio and advantage."""
    correction: tuple[Correction, ...] = ()
    """Constant weights for tokens that were sampled by older weights or by another implementation of the model."""
    kl: ReferenceKL | None = None
    """KL term that holds the policy near a reference model."""
    kl_loss: PluginPiece | None = None
    """A KL term of your own: a class in Trinity-RFT's form (``KLFn``), by its dotted path. ``kl_loss_fn`` sets it for a
    class that a module in ``plugin_dirs`` registers."""
    entropy_loss: PluginPiece | None = None
    """An entropy term of your own: a class in Trinity-RFT's form (``EntropyLossFn``), by its dotted path.
    ``entropy_loss_fn`` sets it for a class that a module in ``plugin_dirs`` registers."""
    regularisers: tuple[Regulariser, ...] = ()
    """Additional terms for each token."""
    reduction: Reduction = Field(default_factory=Reduction)
    """The reduction of token losses to a sum."""
    imitation: Likelihood = Field(default_factory=Likelihood)
    """Loss of the component ``ce``."""
    distillation: Distill = Field(default_factory=Distill)
    """Loss of the component ``ref_kl``."""
    pair: Pair = Field(default_factory=Pair)
    """Loss of the component ``pair``."""
    weights: ComponentWeights = Field(default_factory=ComponentWeights)
    """Weights of the components."""
    ce_schedule: Schedule | None = None
    """Weight of ``ce`` over train steps; the weight of ``rl`` is then 1 minus this weight. Null: the fixed ``weights``.
    """
