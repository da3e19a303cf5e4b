"""Text output of ``trinity-mq regrade``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

TEXT = 60
"""Maximum width of a response in characters."""


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
