"""docs/retries.md names only files, constants, settings, metrics, log events and commands that exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from tests.metric_names import undocumented
from trinity_mq.config.settings_table import all_settings
from trinity_mq.telemetry.group_drops import GROUP_DROPS

ROOT = Path(__file__).parents[2]
ROOMS = (ROOT / "trinity_mq", ROOT / "agents" / "trinity_agents")
PAGE = (ROOT / "docs" / "retries.md").read_text(encoding="utf-8")
PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
TABLES = [[line for line in part.splitlines() if line.startswith("| ")][1:] for part in PARTS]
ROWS = [row for table in TABLES for row in table]
SETTINGS = {setting.key: setting.default.strip("`") for setting in all_settings()}
SECTIONS = {key.split(".")[0] for key in SETTINGS if "." in key}
FILE = r"[\w/]+\.py"
CONSTANT = r"[A-Z][A-Z_]+"
METRIC = r"[\w<>]+(?:/[\w<>]+)+"
EVENTS = r"log ((?:`\w+`(?:, )?)+)"
MIN_LEVELS, MIN_REASONS = 40, 50
MAX_LINE, MAX_CELL = 160, 200


def tokens(text: str) -> list[str]:
    """Return what the text sets as code, without the values of keys."""
    return [token.split(": ")[0] for token in re.findall(r"`([^`]+)`", text)]


def is_setting(token: str) -> bool:
    return token in SETTINGS or re.fullmatch(rf"(?:{'|'.join(SECTIONS)})\.[\w.<>=]+", token) is not None


def files(row: str) -> list[Path]:
    """Return the files that a row names."""
    names = [token for token in tokens(row) if re.fullmatch(FILE, token)]
    return [path for name in names for room in ROOMS if (path := room / name).is_file()]


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def everything() -> str:
    return "\n".join(source(path) for room in ROOMS for path in sorted(room.rglob("*.py")))


def test_the_page_has_both_tables_and_is_legible() -> None:
    levels, reasons = TABLES
    assert len(levels) >= MIN_LEVELS
    assert len(reasons) >= MIN_REASONS
    assert {row.count(" | ") for row in levels} == {5}
    assert {row.count(" | ") for row in reasons} == {4}
    lines = [line for line in PAGE.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_LINE] == []
    assert [cell for row in ROWS for cell in row.strip("| ").split(" | ") if len(cell) > MAX_CELL] == []
    words = tokens("\n".join(lines))
    assert {token for token in words if is_setting(token)} <= SETTINGS.keys()
    assert {token for token in words if token.startswith("trinity-mq ") and not is_there(token, ())} == set()


def wrong(row: str) -> set[str]:
    """Return what a row names and what is not there."""
    named = files(row)
    events = {event for match in re.findall(EVENTS, row) for event in tokens(match)}
    metrics = {token for token in tokens(row) if re.fullmatch(METRIC, token)}
    others = set(tokens(row)) - events - metrics
    return (
        undocumented(metrics)
        | {event for event in events if f'"{event}"' not in everything()}
        | {token for token in others if not is_there(token, named)}
    )


def is_there(token: str, named: Sequence[Path]) -> bool:
    if re.fullmatch(FILE, token):
        return any((room / token).is_file() for room in ROOMS)
    if token.startswith("trinity-mq "):
        return (ROOMS[0] / "cli" / f"{token.split()[1]}.py").is_file()
    if is_setting(token):
        return token in SETTINGS
    if re.fullmatch(CONSTANT, token):
        return any(re.search(rf"(?m)^[A-Z_, ]*\b{token}\b.*=", source(path)) for path in named)
    words = re.split(r"\W+", token)
    return token in SECTIONS or any(all(word in source(path) for word in words) for path in named)


def other_values(row: str) -> set[tuple[str, str]]:
    """Return the settings and constants of a row whose value in brackets is not the value of the code."""
    others = set[tuple[str, str]]()
    for token, value in re.findall(r"`([^`]+)` \(`?([\w.]+)", row):
        if token in SETTINGS:
            default = SETTINGS[token]
            is_same = float(default) == float(value) if value[0].isdigit() else default == value
        else:
            continue
        if not is_same:
            others.add((token, value))
    return others


def test_a_row_names_what_is_there() -> None:
    assert {row: missing for row in ROWS if (missing := wrong(row))} == {}
    assert [row for row in ROWS if not files(row)] == []
    assert {row: others for row in ROWS if (others := other_values(row))} == {}, "other values than those of the code"


def test_the_reasons_for_dropping_a_group_are_those_of_the_code() -> None:
    kind = r"a (?:replayed )?group(?: or experience| of a tapped run)?: (.*)"
    rows = [row.strip("| ").split(" | ") for row in TABLES[1]]
    reasons = {reason[1]: tokens(row[2]) for row in rows if (reason := re.fullmatch(kind, row[0])) is not None}
    dropped = {reason: next(iter(metrics), "") for reason, metrics in reasons.items() if "not dropped" not in reason}
    assert dropped == {drop.reason: drop.metric for drop in GROUP_DROPS}
    others = everything().replace(source(ROOMS[0] / "telemetry" / "group_drops.py"), "")
    assert re.findall(r'"[a-z]+/(?:dropped|filtered|lost|low|partial)\w*groups"', others) == [], "take the table's"
