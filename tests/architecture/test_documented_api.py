"""The signatures of the documented interface: each parameter is there, in its place, and all others are optional."""

from __future__ import annotations

import csv
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

import trinity_mq

with Path(__file__).with_name("documented_api.csv").open(encoding="utf-8") as table:
    DOCUMENTED = {row["name"]: row["parameters"] for row in csv.DictReader(table)}
"""Parameters by name in ``trinity_mq``; those behind ``*`` are given by keyword."""
COROUTINES = {
    *("Explorer.explore", "Explorer.get_weight", "Explorer.setup_weight_sync_group", "RunnerWrapper.run_with_retry"),
    *("Scheduler.get_results", "Scheduler.start", "Scheduler.stop", "Scheduler.wait_all"),
    *("ExperienceOperatorV1.close", "ExperienceOperatorV1.prepare", "ExperienceOperatorV1.process"),
}
PROPERTIES = {"EID": "uid sid rid tid", "Workflow": "repeatable resettable", "StepWiseRewardWorkflow": "max_step_num"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_documented_can_be_called_so(name: str) -> None:
    called: Any = functools.reduce(getattr, name.split("."), trinity_mq)
    given = [one for one in inspect.signature(called).parameters.values() if one.name not in {"self", "cls"}]
    for place, documented in enumerate(DOCUMENTED[name].split()):
        spelled, _, default = documented.partition("=")
        by_keyword, spelled = spelled.startswith("*"), spelled.removeprefix("*")
        parameter = next((one for one in given if one.name == spelled), None)
        assert parameter is not None, f"{name} has no parameter {spelled}"
        if not by_keyword:
            assert given.index(parameter) == place
            assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if default:
            assert repr(parameter.default) == default
    wanted = {one.partition("=")[0].removeprefix("*") for one in DOCUMENTED[name].split()}
    required = [one.name for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    assert [one for one in required if one not in wanted] == [], "what is not documented is optional"
    if "." in name:
        assert inspect.iscoroutinefunction(called) == (name in COROUTINES)


def test_documented_properties() -> None:
    for owner, names in PROPERTIES.items():
        kind = getattr(trinity_mq, owner)
        assert [name for name in names.split() if not isinstance(getattr(kind, name, None), property)] == []
