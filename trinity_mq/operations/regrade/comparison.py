"""Figures that compare old and new rewards of graded experiences, and their text."""

from __future__ import annotations

import heapq
import itertools
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

SHOWN = 10
"""Number of most changed experiences that are kept."""
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BINARY = {0.0, 1.0}
TEXT = 60
"""Maximum width of a response in characters."""


@dataclass(frozen=True, slots=True)
class RegradedExperience:
    """The rewards and advantages of one experience under the old and the new reward function."""

    uid: str
    group: str
    """Id of the experience's task. Experiences of the same group are compared with each other."""
    old: float
    new: float
    old_advantage: float | None = None
    """Mean over the trained tokens. None: the experience lacks an advantage, or advantages are not compared."""
    new_advantage: float | None = None
    text: str = ""
    """The response text, cut to a maximum length."""


@dataclass
class Comparison:
    """Running totals of the comparison. In addition to a few numbers per experience, it keeps the most changed
    experiences.
    """

    old: array[float] = field(default_factory=lambda: array("d"))
    new: array[float] = field(default_factory=lambda: array("d"))
    old_advantages: array[float] = field(default_factory=lambda: array("d"))
    """Absolute old advantages of experiences that have both an old and a new advantage."""
    new_advantages: array[float] = field(default_factory=lambda: array("d"))
    pairs: Counter[tuple[float, float]] = field(default_factory=Counter)
    """Counts of (old reward, new reward), for pairs with both rewards 0 or 1."""
    changed: int = 0
    groups: int = 0
    inverted_groups: int = 0
    """Number of groups with at least one pair of experiences whose reward order is inverted."""
    inverted_pairs: int = 0
    ties_broken: int = 0
    ties_made: int = 0
    compared_pairs: int = 0
    gain_spread: int = 0
    """Number of groups whose experiences had equal rewards and now have unequal rewards, so that they begin to
    contribute a gradient."""
    lose_spread: int = 0
    sign_flips: int = 0
    """Number of experiences whose advantage changes its sign."""
    advantages_appear: int = 0
    """Number of experiences whose advantage is missing or 0 before and non-zero after."""
    advantages_vanish: int = 0
    _most_changed: list[tuple[float, float, int, RegradedExperience]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, experiences: Sequence[RegradedExperience]) -> None:
        """Add the experiences of whole groups."""
        by_group: dict[str, list[RegradedExperience]] = {}
        for experience in experiences:
            by_group.setdefault(experience.group, []).append(experience)
            self._add_one(experience)
        for members in by_group.values():
            self._add_group(members)

    def _add_one(self, graded: RegradedExperience) -> None:
        self.old.append(graded.old)
        self.new.append(graded.new)
        self.changed += graded.old != graded.new
        self.pairs[graded.old, graded.new] += {graded.old, graded.new} <= BINARY
        before, after = graded.old_advantage or 0.0, graded.new_advantage or 0.0
        if graded.old_advantage is not None and graded.new_advantage is not None:
            self.old_advantages.append(abs(before))
            self.new_advantages.append(abs(after))
        self.sign_flips += before * after < 0
        self.advantages_appear += not before and bool(after)
        self.advantages_vanish += bool(before) and not after
        difference = abs(graded.new - graded.old)
        if difference or before != after:
            entry = (difference, abs(after - before), -next(self._numbers), graded)
            (heapq.heappush if len(self._most_changed) < SHOWN else heapq.heappushpop)(self._most_changed, entry)

    def _add_group(self, members: Sequence[RegradedExperience]) -> None:
        self.groups += 1
        inverted = 0
        for first, second in itertools.combinations(members, 2):
            before, after = first.old - second.old, first.new - second.new
            inverted += before * after < 0
            self.ties_broken += before == 0 and after != 0
            self.ties_made += before != 0 and after == 0
            self.compared_pairs += 1
        self.inverted_pairs += inverted
        self.inverted_groups += inverted > 0
        had_spread, has_spread = (
            len({member.old for member in members}) > 1,
            len({member.new for member in members}) > 1,
        )
        self.gain_spread += has_spread and not had_spread
        self.lose_spread += had_spread and not has_spread

    @property
    def most(self) -> list[RegradedExperience]:
        """The most changed experiences, sorted by reward change, then by advantage change."""
        return [entry[-1] for entry in sorted(self._most_changed, key=lambda entry: entry[:3], reverse=True)]

    @property
    def is_binary(self) -> bool:
        """True if all old and new rewards are 0 or 1."""
        return sum(self.pairs.values()) == len(self.old)

    def figures(self) -> dict[str, Any]:
        """Return all figures as a JSON object. Means over no values are null."""
        return {
            "experiences": len(self.old),
            "changed": self.changed,
            "reward": {"old": _mean(self.old), "new": _mean(self.new)},
            **({"confusion": self._confusion()} if self.is_binary else {"quantiles": self._quantiles()}),
            "groups": {
                "count": self.groups,
                "inverted": self.inverted_groups,
                "gain_spread": self.gain_spread,
                "lose_spread": self.lose_spread,
            },
            "pairs": {
                "compared": self.compared_pairs,
                "inverted": self.inverted_pairs,
                "ties_broken": self.ties_broken,
                "ties_made": self.ties_made,
            },
            "advantage": {
                "compared": len(self.old_advantages),
                "old_abs_mean": _mean(self.old_advantages),
                "new_abs_mean": _mean(self.new_advantages),
                "sign_flips": self.sign_flips,
                "appear": self.advantages_appear,
                "vanish": self.advantages_vanish,
            },
            "most_changed": [
                {
                    "uid": graded.uid,
                    "reward": {"old": graded.old, "new": graded.new},
                    "advantage": {"old": graded.old_advantage, "new": graded.new_advantage},
                    "response_text": graded.text,
                }
                for graded in self.most
            ],
        }

    def _confusion(self) -> dict[str, dict[str, int]]:
        return {f"{old:g}": {f"{new:g}": self.pairs[old, new] for new in (0.0, 1.0)} for old in (0.0, 1.0)}

    def _quantiles(self) -> list[dict[str, float]]:
        old, new = (np.quantile(rewards, QUANTILES).tolist() for rewards in (self.old, self.new))
        return [{"quantile": q, "old": old[n], "new": new[n]} for n, q in enumerate(QUANTILES)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if len(values) else None


def print_figures(figures: Mapping[str, Any], out: TextIO) -> None:
    """Print the figures of :func:`trinity_mq.operations.regrade.run.all_figures`."""
    from trinity_mq.observability.experiences.show_experience import line, open_console

    console = open_console(out)

    def say(name: str, value: str) -> None:
        line(console, name, value)

    count, total = figures["experiences"], figures["seen"]
    say("regraded", f"{count} of {total} experiences in {figures['batches']} batches, by {figures['reward_function']}")
    for reason, number in figures["not_regraded"].items():
        say("not", f"{number}: {reason}")
    seconds = figures["seconds"]
    if seconds["calls"]:
        say(
            "seconds",
            f"{seconds['total']:.3g} in {seconds['calls']} calls, {seconds['mean']:.3g} a call, the longest "
            f"{seconds['longest']:.3g}",
        )
    for remark in figures["remarks"]:
        say("note", remark)
    if not count:
        return
    reward, groups, pairs = figures["reward"], figures["groups"], figures["pairs"]
    say("reward", f"mean {reward['old']:.4f} -> {reward['new']:.4f}, {figures['changed']} change")
    console.print(_confusion(figures["confusion"]) if "confusion" in figures else _quantiles(figures["quantiles"]))
    say(
        "groups",
        f"{groups['count']}: {groups['gain_spread']} gain a spread of rewards (become useful for training), "
        f"{groups['lose_spread']} lose it, {groups['inverted']} change the order of two runs",
    )
    say(
        "pairs",
        f"{pairs['compared']} of runs of a group: {pairs['inverted']} reversed, {pairs['ties_broken']} ties "
        f"broken, {pairs['ties_made']} made",
    )
    advantage = figures["advantage"]
    if advantage["compared"]:
        say(
            "advantage",
            f"mean size {advantage['old_abs_mean']:.4f} -> {advantage['new_abs_mean']:.4f}; {advantage['sign_flips']} "
            f"change their sign, {advantage['appear']} appear, {advantage['vanish']} vanish",
        )
    if figures["most_changed"]:
        say("most", "changed")
        console.print(_most(figures["most_changed"]))


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _confusion(confusion: Mapping[str, Mapping[str, int]]) -> Any:
    table = _table("old \\ new", "0", "1")
    for old, row in confusion.items():
        table.add_row(old, *(str(row[new]) for new in ("0", "1")))
    return table


def _quantiles(quantiles: list[dict[str, float]]) -> Any:
    table = _table("quantile", "old", "new")
    for row in quantiles:
        table.add_row(*(f"{row[name]:.4g}" for name in ("quantile", "old", "new")))
    return table


def _most(most: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    from trinity_mq.terminal import escape_unsafe

    table = _table("experience", "reward", "advantage")
    table.add_column("response", overflow="ellipsis", no_wrap=True, max_width=TEXT)
    for change in most:
        reward, advantage = change["reward"], change["advantage"]
        shown = ["-" if value is None else f"{value:+.3f}" for value in (advantage["old"], advantage["new"])]
        text = escape_unsafe(" ".join(change["response_text"].split()))
        table.add_row(change["uid"], f"{reward['old']:g} -> {reward['new']:g}", " -> ".join(shown), Text(text))
    return table
