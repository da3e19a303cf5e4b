"""Reward functions by name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.runtime.plugins import Registry, resolve
from trinity_mq.runtime.threads import await_in_thread

REWARDS = Registry(
    {
        "accuracy_reward": "trinity_mq.rewards.trinity_rewards:AccuracyReward",
        "char_match": "trinity_mq.rewards.text:char_match",
        "countdown": "trinity_mq.rewards.countdown:countdown_reward",
        "countdown_reward": "trinity_mq.rewards.trinity_rewards:CountDownRewardFn",
        "exact_match": "trinity_mq.rewards.text:exact_match",
        "format_reward": "trinity_mq.rewards.trinity_rewards:FormatReward",
        "gsm8k": "trinity_mq.rewards.math.math_answer:math_answer",
        "math_answer": "trinity_mq.rewards.math.math_answer:math_answer",
        "math_boxed": "trinity_mq.rewards.math.rewards:math_boxed",
        "math_boxed_reward": "trinity_mq.rewards.trinity_rewards:MathBoxedRewardFn",
        "math_dapo": "trinity_mq.rewards.math.rewards:MathDapoReward",
        "math_dapo_reward": "trinity_mq.rewards.trinity_rewards:MathDAPORewardFn",
        "math_equal": "trinity_mq.rewards.math.rewards:accuracy_reward",
        "math_equal_format": "trinity_mq.rewards.math.rewards:math_reward",
        "math_reward": "trinity_mq.rewards.trinity_rewards:MathRewardFn",
        "reasoning_gym_reward": "trinity_mq.rewards.reasoning_gym_scores:reasoning_gym_reward",
        "rlcr_reward": "trinity_mq.rewards.trinity_rewards:RLCRRewardFn",
        "text_format": "trinity_mq.rewards.text:format_reward",
        "tool_call": "trinity_mq.rewards.tool_call:tool_call",
    },
    "REWARD_FUNCTIONS",
    "REWARDS",
)
"""Built-in reward functions, and functions that ``@REWARD_FUNCTIONS.register_module`` adds."""
REWARD_FUNCTIONS = REWARDS
"""Name of ``REWARDS`` in Trinity-RFT."""

ENTRY_GROUP = "trinity_mq.rewards"
"""Entry-point group under which installed packages add reward functions."""

ACCURACY = "accuracy"
"""The part that evaluation reports: 1.0 for a right answer, else 0.0."""


MESSAGES = "messages"
"""Parameter of a reward function that judges the conversation."""

EXTRAS = frozenset({"tokens", "record", "prompt_end"})
"""Optional parameters of a reward function, in addition to the parameters of :class:`RewardFn`."""

RESPONSE_EXTRAS = frozenset({"response_token", "info", "with_think", "format_score_coef"})
"""Optional parameters that Trinity-RFT passes to rewards of single-turn workflows. They are passed if the function has
them, or takes any name, and the workflow has a value for them.
"""

_BY_NAME = ("response", "prompt", "truth", "finished")
"""Arguments of a reward function that takes them by name."""


@runtime_checkable
class RewardFn(Protocol):
    """Judges one response. Pure: equal arguments give equal parts, independent of earlier calls."""

    def __call__(self, response: str, truth: str | None, *, finished: bool) -> Mapping[str, float]:
        """Return the parts of the reward by name; the reward is their sum, and each part becomes a metric.

        A number or a boolean alone is the part ``accuracy``. The function may be a coroutine function.

        Args:
            response: The text of the response.
            truth: The dataset's right answer.
            finished: Whether the response ended by itself and was not cut at a limit.

        The following parameters are optional:

        - ``tokens`` gets the number of response tokens, if known.
        - ``record`` gets the task's record as the dataset gave it.
        - ``prompt_end`` gets the end of the prompt for :func:`trinity_mq.families.thoughts.after_thoughts`; None if
          unknown.
        - ``response_token`` gets the token ids of the response, ``info`` the ``info`` of its experience, ``with_think``
          and ``format_score_coef`` the arguments of ``math_boxed_workflow``.
        - ``messages`` makes the function judge the conversation, like a reward model. It is called as
          ``reward(experience, messages, ground_truth=truth)``. The workflow ``math_rm_workflow`` does this.

        A function that takes its arguments by name, as in Trinity-RFT (``response``, ``prompt``, ``truth``, or
        ``**kwargs``), is called with these names. The prompt is not known here, so ``prompt`` is None.

        The object that :func:`create_reward` returns has the attributes of the function or instance that it calls. It
        also takes its arguments by name, and leaves out arguments that the function does not have.
        """
        ...


class RewardError(ValueError):
    """A reward function cannot be called, cannot judge this task, or did not return its parts as numbers."""


def create_reward(reward: str | Any, args: Mapping[str, Any]) -> _Reward:
    """Return ``reward`` with ``args`` filled in.

    ``reward`` is a name (built in, or of an entry point), a dotted path, a function or a class. A class is instantiated
    with ``args`` and its instance is called; a function gets ``args`` as keywords. A class is instantiated only if its
    instances can be called as a reward function.

    Raises:
        UnknownNameError: The name does not exist.
        RewardError: The reward function does not take these arguments.
    """
    target = find_reward(reward) if isinstance(reward, str) else reward
    label = reward if isinstance(reward, str) else getattr(target, "__qualname__", repr(target))
    if not callable(target):
        raise RewardError(f"reward function {label!r} is a {type(target).__name__}, wanted a function or a class")
    try:
        if inspect.isfunction(target) and not args:  # cached, because each slice asks for the same few functions
            return _Reward(target, *_call_form(target))
        if inspect.isclass(target):
            # checked before the class runs its own code
            call = next((vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)), None)
            if not inspect.isfunction(call):
                raise TypeError(f"instances of the class {target.__qualname__} cannot be called")
            _call_form.__wrapped__(functools.partial(call, None))
        fn: Any = target(**args) if inspect.isclass(target) else functools.partial(target, **args)
        extras, names = _call_form.__wrapped__(fn)
    except (TypeError, ValueError) as error:
        wrong = (
            f"reward function {label!r} cannot be called as reward(response, truth, *, finished) with "
            f"reward_fn_args {dict(args)!r}: {error}"
        )
        raise RewardError(Secrets(args).hide(wrong)) from error
    return _Reward(fn, extras - args.keys(), names)


def find_reward(name: str) -> Any:
    """Return the function or class that ``name`` refers to, as in :func:`create_reward`, without calling it.

    Raises:
        UnknownNameError: The name does not exist.
    """
    return resolve("reward function", name, REWARDS, ENTRY_GROUP)


@functools.lru_cache(maxsize=256)
def _call_form(fn: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the optional arguments that a reward function gets, and the names by which it takes its arguments. The
    names are empty for a function that is called as :class:`RewardFn`. A function that takes any name gets all
    RESPONSE_EXTRAS if it is called as in Trinity-RFT or has some of them.

    Raises:
        TypeError: The object cannot be called as a reward function.
        ValueError: The object has no signature.
    """
    signature = inspect.signature(fn)
    parameters = signature.parameters
    extras = (EXTRAS | RESPONSE_EXTRAS) & parameters.keys()
    if MESSAGES in parameters:
        signature.bind("experience", [], ground_truth="truth")
        return frozenset(), (MESSAGES,)
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names: tuple[str, ...] = ("response", "prompt", "truth") if "prompt" in parameters else ()
    try:
        signature.bind("response", "truth", finished=True, **dict.fromkeys(extras))
    except TypeError:
        names = tuple(name for name in _BY_NAME if takes_any_name or name in parameters)
        if not {"response", "truth"}.issubset(names):
            raise
        signature.bind(**dict.fromkeys((*names, *extras)))
    # a function that takes any name may pass the names on to a function that has them
    if takes_any_name and (names or not extras.isdisjoint(RESPONSE_EXTRAS)):
        extras |= RESPONSE_EXTRAS
    return extras, names


class _Reward:
    """Calls a reward function with the arguments that it takes, by position or by name."""

    def __init__(self, fn: Any, extras: frozenset[str], names: tuple[str, ...]) -> None:
        self.function, self.extras, self._names = fn, extras, names
        self.judges_conversation = names == (MESSAGES,)

    def __call__(
        self, response: Any, truth: Any = None, *, finished: bool = True, prompt: str | None = None, **optional: Any
    ) -> dict[str, float]:
        """Return the parts of the reward; see :func:`parts_of` and, with ``ground_truth``, :func:`judge_conversation`.

        Raises:
            RewardError: The function judges conversations and did not get a conversation, or did not return numbers by
                name.
        """
        if self.judges_conversation:
            if "ground_truth" not in optional:
                raise RewardError(
                    f"reward function {_name_and_place(self)} judges the conversation (it has a parameter messages), "
                    "which this workflow does not give it; use math_rm_workflow, or a reward(response, truth, *, "
                    "finished)"
                )
            return _checked(self, self.function(response, truth, ground_truth=optional["ground_truth"]))
        more = {name: optional.get(name) for name in self.extras if name in EXTRAS or name in optional}
        if self._names:
            arguments = {"response": response, "prompt": prompt, "truth": truth_text(truth), "finished": finished}
            return _checked(self, self.function(**{name: arguments[name] for name in self._names}, **more))
        return _checked(self, self.function(response, truth_text(truth), finished=finished, **more))

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # a copy in the making has no attributes yet
            raise AttributeError(name)
        return getattr(self.function, name)


def judge_conversation(
    reward_fn: RewardFn, response: Any, messages: Sequence[Mapping[str, Any]], truth: str | None
) -> dict[str, float]:
    """Call ``reward_fn``, which judges conversations, and return its parts.

    Args:
        reward_fn: The function.
        response: The experience of the answer.
        messages: The conversation before the answer.
        truth: The dataset's right answer.

    Raises:
        RewardError: The function does not judge conversations, or did not return numbers by name.
    """
    bound = _bound(reward_fn)
    if not bound.judges_conversation:
        raise RewardError(
            f"reward function {_name_and_place(reward_fn)} does not judge conversations, wanted a function that is "
            "called as reward(experience, messages, ground_truth=truth), such as a reward model's"
        )
    return bound(response, messages, ground_truth=truth)


def _bound(reward_fn: Any) -> _Reward:
    """Return ``reward_fn`` as :func:`create_reward` makes it; a workflow may have assigned a function or an instance.

    Raises:
        RewardError: ``reward_fn`` cannot be called as a reward function.
    """
    return reward_fn if isinstance(reward_fn, _Reward) else create_reward(reward_fn, {})


def parts_of(
    reward_fn: RewardFn,
    response: str,
    truth: str | None,
    *,
    finished: bool,
    tokens: int | None = None,
    record: Mapping[str, Any] | None = None,
    prompt_end: str | None = None,
    **optional: Any,
) -> dict[str, float]:
    """Call ``reward_fn`` in the way that :class:`RewardFn` describes, and return its parts.

    Args:
        reward_fn: The function.
        response: The text of the response.
        truth: The dataset's right answer.
        finished: Whether the response ended by itself.
        tokens: Number of response tokens. None: unknown.
        record: The task's record. None: unknown.
        prompt_end: The prompt, or its last characters. None: unknown.
        optional: Values of RESPONSE_EXTRAS.

    Raises:
        RewardError: ``reward_fn`` cannot be called as a reward function, judges conversations, or did not return
            numbers by name.
    """
    optional |= {"tokens": tokens, "record": record, "prompt_end": prompt_end}
    return _bound(reward_fn)(response, truth, finished=finished, **optional)


def invalid_parts_reason(reward_fn: RewardFn, parts: Mapping[str, float]) -> str | None:
    """Return the reason why ``parts`` of ``reward_fn`` cannot be trained on, or None if all are finite numbers."""
    wrong = ", ".join(f"{name}={value}" for name, value in parts.items() if not math.isfinite(value))
    return f"reward function {_name_and_place(reward_fn)} returned {wrong}, wanted finite numbers" if wrong else None


def _checked(reward_fn: RewardFn, parts: Any) -> dict[str, float]:
    if inspect.isawaitable(parts):
        parts = await_in_thread(parts)
    if type(parts) is dict and set(map(type, parts)) == {str} and set(map(type, parts.values())) == {float}:
        return dict(parts)  # fast path for most reward functions
    named = parts if isinstance(parts, Mapping) else {ACCURACY: parts}
    numbers = {str(key): _number(value) for key, value in named.items()}
    valid = {key: value for key, value in numbers.items() if value is not None}
    if not valid or len(valid) < len(numbers):
        raise RewardError(
            f"reward function {_name_and_place(reward_fn)} gave {parts!r:.80}, wanted its parts by name, such as "
            "{'accuracy': 1.0}, or one number"
        )
    return valid


def _number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number or boolean as float; None for any other value."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    return float(plain) if isinstance(plain, Real) else None


def _name_and_place(reward_fn: Any) -> str:
    target = reward_fn.function if isinstance(reward_fn, _Reward) else reward_fn
    target = inspect.unwrap(target.func if isinstance(target, functools.partial) else target)
    function = target if inspect.isroutine(target) else type(target).__call__
    name = getattr(target, "__qualname__", type(target).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
