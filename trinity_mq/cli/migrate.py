"""``trinity-mq migrate``: converts a Trinity-RFT configuration into a trinity_mq configuration, and the import lines of
a plug-in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.load import STAGES, read_file
from trinity_mq.config.loading.problems import KeyLines, keys_in, location_of
from trinity_mq.errors import CommandError
from trinity_mq.terminal import write_output
from trinity_mq.trinity_rft.migration import LeftOut, Migration, as_yaml, comment_lines, migrate
from trinity_mq.trinity_rft.migration.imports import PluginSyntaxError, migrate_plugin
from trinity_mq.trinity_rft.migration.pairs import half_mode, join_halves, other_half
from trinity_mq.trinity_rft.migration.verl import with_trainer_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq migrate``."""
    parser.add_argument(
        "source",
        type=Path,
        help="configuration of Trinity-RFT, YAML, or a plug-in, .py, whose import lines are rewritten",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where to write ours; default: standard output")
    parser.add_argument(
        "--plugin-dir",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder of plug-ins, as in `trinity run --plugin-dir`: it is written as plugin_dirs; repeatable",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def migrate_file(arguments: argparse.Namespace) -> int:
    """Write the converted configuration. Print on stderr its missing counterparts and whether it is valid."""
    source, out = arguments.source, arguments.out
    if missing := [folder for folder in arguments.plugin_dir if not Path(folder).is_dir()]:
        raise CommandError(f"--plugin-dir: there is no folder {missing[0]!r}; relative folders start here")
    if source.suffix == ".py":
        return _migrate_plugin(source, out, force=arguments.force)
    try:
        settings = with_trainer_config(source, read_file(source))
        other = other_half(source, settings)
        joined, overridden = (settings, []) if other is None else _joined(source, settings, *other)
        if arguments.plugin_dir:
            joined = {**joined, "plugin_dirs": arguments.plugin_dir}
        migration = migrate(joined)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    migration = replace(migration, left_out=[*overridden, *migration.left_out])
    if other is None and _waits_for_other_half(source, settings):
        return 1
    if out is not None and out.exists() and not arguments.force:
        raise CommandError(f"{out} already exists; give another name, or --force to overwrite it")
    sources = [source] if other is None else [source, other[0]]
    text = "".join(f"{line}\n" for line in _header(sources)) + "\n" + as_yaml(migration.settings, migration.comments)
    text += "".join(f"{line}\n" for line in _footer(migration))
    if out is None:
        print(text, end="")
    else:
        write_output(out, text)
    return _report(migration, yaml.safe_load(text), out, _Places(sources))


def _waits_for_other_half(source: Path, settings: dict[str, Any]) -> bool:
    """Return whether a configuration is nothing without another file. Print where to put that file."""
    mode = half_mode(settings)
    if not mode:
        return False
    needs, other = (
        ("its experiences come from", "explorer") if mode == "train" else ("a trainer may read", "trainer")
    )  # fmt: skip
    print(
        f"{source}: mode {mode}: {needs} the queue of another process of the same run. Put the file of the {other} "
        "(the same project and name) into the same folder, and both become one configuration",
        file=sys.stderr,
    )
    return mode == "train"


def _joined(
    source: Path, settings: dict[str, Any], other: Path, rest: dict[str, Any]
) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return the configuration of both agents of a run, and the settings of one file that the other overrides."""
    is_explorer = settings.get("mode") == "explore"
    print(
        f"{source.name} and {other.name} are the explorer and the trainer of one run: the result is the configuration "
        "of both. `trinity-mq run` starts all agents; `trinity-mq explorer`, `runner`, `operator` and `trainer` start "
        "one of them each, on any machine that reaches the broker",
        file=sys.stderr,
    )
    return join_halves(settings, rest) if is_explorer else join_halves(rest, settings)


class _Places:
    """Places of settings in the files of Trinity-RFT.

    Args:
        sources: The files.
    """

    def __init__(self, sources: Sequence[Path]) -> None:
        self._lines = {path.name: KeyLines(path.read_text(encoding="utf-8", errors="replace")) for path in sources}

    def of(self, key: str) -> str:
        """Return a dotted key with its file and its line, if a file has the key."""
        for name, lines in self._lines.items():
            if (line := lines.line_of_key(location_of(key))) is not None:
                return f"{key} ({name} line {line})"
        return key


def _migrate_plugin(source: Path, out: Path | None, *, force: bool) -> int:
    """Write a plug-in with our import lines. Print on stderr the changed lines, and the names without a counterpart.
    Return 1 if there are such names, else 0.
    """
    try:
        plugin = migrate_plugin(source.read_bytes())
    except OSError as error:
        raise CommandError(f"{source} cannot be read: {error.strerror}") from None
    except PluginSyntaxError as error:
        raise CommandError(f"{source}: {error}") from None
    if out is not None and out.exists() and not force:
        raise CommandError(f"{out} already exists; give another name, or --force to overwrite it")
    if out is None:
        sys.stdout.buffer.write(plugin.source)
        sys.stdout.buffer.flush()
    else:
        try:
            out.write_bytes(plugin.source)
        except OSError as error:
            raise CommandError(f"{out} cannot be written: {error.strerror or error}; give another file") from error
    for line, text in plugin.lines:
        print(f"{source}:{line}: {text}", file=sys.stderr)
    for line, name, reason in plugin.missing:
        print(f"no counterpart: {source}:{line}: {name} - {reason}", file=sys.stderr)
    if plugin.missing:
        return 1
    count = len(plugin.lines)
    print(
        f"{count} import line{'s' * (count != 1)} rewritten; put the file into a folder of plugin_dirs", file=sys.stderr
    )
    return 0


def _header(sources: Sequence[Path]) -> Iterator[str]:
    names, count = " and ".join(path.name for path in sources), len(sources)
    kind = "a configuration" if count == 1 else "the explorer and the trainer of one run"
    yield from comment_lines(f"Written by trinity-mq migrate from {names}, {kind} of Trinity-RFT.")
    yield from comment_lines("Comments say what is called or set differently there; settings without one are the same.")


def _footer(migration: Migration) -> Iterator[str]:
    for title, group in _groups(migration.left_out):
        yield ""
        yield from comment_lines(title)
        for setting in group:
            yield from comment_lines(f"  {setting.key}: {_short(setting.value)} - {setting.reason}")


def _groups(left_out: Sequence[LeftOut]) -> Iterator[tuple[str, list[LeftOut]]]:
    for matters, title in ((True, "Has no counterpart here:"), (False, "Is not needed here:")):
        if group := [entry for entry in left_out if entry.matters == matters]:
            yield title, group


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _report(migration: Migration, settings: dict[str, Any], out: Path | None, places: _Places) -> int:
    """Print the settings that need attention. Return 1 if the run lost its purpose, or if the converted configuration
    is not valid without an edit, else 0.
    """
    name = str(out) if out is not None else "the result"
    if lost := {entry.reason: entry for entry in reversed(migration.left_out) if entry.is_purpose}:
        reasons = [f"{places.of(entry.key)}: {_short(entry.value)}: {entry.reason}" for entry in lost.values()]
        print(f"{name} cannot replace the run: {'; '.join(reversed(reasons))}", file=sys.stderr)
        return 1
    for note in migration.notes:
        print(f"note: {places.of(note.key)}: {_short(note.value)} - {note.reason}", file=sys.stderr)
    for entry in migration.left_out:
        if entry.matters:
            print(f"no counterpart: {places.of(entry.key)}: {_short(entry.value)} - {entry.reason}", file=sys.stderr)
    try:
        load_stages(settings) if STAGES in settings else load_config(settings)
    except ConfigError as error:
        texts = [problem.text for problem in error.problems] or str(error).split("\n")
        lines = [_with_origin(text.removeprefix("configuration: "), migration, places) for text in texts]
        shown = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
        print(f"{name} needs an edit:{shown}", file=sys.stderr)
        if "plugin_dirs" in shown:
            print("if a plug-in has this name: --plugin-dir FOLDER names the folder of plug-ins", file=sys.stderr)
        return 1
    following = (
        f"trinity-mq validate {out}" if out is not None else "write it with -o FILE, then trinity-mq validate it"
    )
    print(f"{name} is valid; next: {following}", file=sys.stderr)
    return 0


def _with_origin(text: str, migration: Migration, places: _Places) -> str:
    """Return a message about keys of the result, with the keys of Trinity-RFT's file that they come from."""
    origins = dict.fromkeys(migration.origin_of(location_of(key)) for key in keys_in(text))
    named = ", ".join(places.of(origin) for origin in origins if origin)
    return f"{text} [from {named}]" if named else text
