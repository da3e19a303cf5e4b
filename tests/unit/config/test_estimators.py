"""The section of the estimator: its kinds, what they say of themselves, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trinity_mq.algorithms.estimators import ESTIMATORS
from trinity_mq.config.estimators import (
    KINDS,
    DiscountedEstimator,
    Estimator,
    EstimatorBase,
    EstimatorPlugin,
    GroupEstimator,
)

ESTIMATOR: TypeAdapter[EstimatorBase] = TypeAdapter(Estimator)


def test_every_kind_is_a_function_and_agents_read_what_was_written() -> None:
    assert set(ESTIMATORS) == set(KINDS)
    assert ESTIMATOR.validate_python("discounted") == DiscountedEstimator()
    for one in (*map(ESTIMATOR.validate_python, KINDS), EstimatorPlugin(kind="my.own", args={"a": 1})):
        assert ESTIMATOR.validate_python(ESTIMATOR.dump_python(one, mode="json")) == one


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("grop", "kind is 'grop', wanted one of group, discounted, gigpo, distill, jsd, gae, none, or the dotted path"),
        ({"scale": "batch"}, "kind is None, wanted one of group"),
        ({"kind": "group", "epsilom": 1}, "epsilom"),
        ({"kind": "group", "tau": 0.0}, "greater than 0"),
        ({"kind": "group", "shift": float("nan")}, "finite"),
        ({"kind": "group", "baseline": "none"}, "scale is 'group' with baseline 'none', wanted none, batch or batch_"),
        ({"kind": "group", "baseline": "role_mean", "scale": "mean"}, "scale is 'mean' with baseline 'role_mean'"),
        (
            {"kind": "group", "baseline": "second_best", "shift": 1.0},
            "shift is 1.0 with baseline 'second_best', wanted 0",
        ),
        ({"kind": "jsd", "beta": 1.0}, "less than 1"),
        ({"kind": "my..function"}, "pattern"),
        ({"kind": "my.function", "args": {"a": float("inf")}}, "a is inf, wanted a finite number"),
    ],
)
def test_what_does_not_fit_is_said(given: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ESTIMATOR.validate_python(given)


def test_what_an_estimator_needs_depends_on_its_fields() -> None:
    given = {name: ESTIMATOR.validate_python({"kind": name}) for name in KINDS} | {
        "alone": GroupEstimator(baseline="none", scale="batch"),
        "roles": GroupEstimator(baseline="role_mean", scale="none"),
        "own": EstimatorPlugin(kind="my.own"),
    }
    assert {name for name, args in given.items() if args.compares_runs} == {"group", "gigpo", "own"}
    assert {name for name, args in given.items() if args.where == "trainer"} == {"roles", "gae"}
    needs = {"roles": ("roles",), "gae": ("critic",), "distill": ("teacher",), "jsd": ("teacher",)}
    assert {name: args.needs for name, args in given.items() if args.needs} == needs
    assert {name for name, args in given.items() if not args.needs_reward} == {"distill", "jsd", "none"}
