"""``trinity-mq migrate``: converts a Trinity-RFT configuration into a trinity_mq configuration, and the import lines of
a plug-in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.load import STAGES, read_file
from trinity_mq.config.loading.problems import KeyLines, Location, Problem, keys_in, location_of
from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.errors import CommandError
from trinity_mq.terminal import write_output
from trinity_mq.trinity_rft.migration import LeftOut, Migration, as_yaml, comment_lines, migrate
from trinity_mq.trinity_rft.migration.imports import PluginSyntaxError, migrate_plugin
from trinity_mq.trinity_rft.migration.pairs import half_mode, join_halves, other_half
from trinity_mq.trinity_rft.migration.transfer import value_at
from trinity_mq.trinity_rft.migration.verl import with_trainer_config

SHOWN = 60
"""Maximum number of characters of a value in a message."""


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
    """Write the converted configuration, or the converted plug-in. Print on stderr the settings or names without a
    counterpart, and for a configuration whether it is valid. Return 0 if the result can be used as it is, else 1.
    """
    source, out = arguments.source, arguments.out
    if missing := [folder for folder in arguments.plugin_dir if not Path(folder).is_dir()]:
        raise CommandError(f"--plugin-dir: there is no folder {missing[0]!r}; relative folders start here")
    if source.suffix == ".py":
        return _migrate_plugin(source, out, force=arguments.force)
    files: dict[Path, dict[str, Any]] = {}
    overridden: list[LeftOut] = []
    try:
        settings = files[source] = with_trainer_config(source, read_file(source))
        if (other := other_half(source, settings)) is not None:
            files[other[0]] = with_trainer_config(*other)
            settings, overridden = join_halves(*files.values())
        if arguments.plugin_dir:
            settings = {**settings, "plugin_dirs": arguments.plugin_dir}
        migration = migrate(settings)
    except ConfigError as error:
        raise ConfigError(Secrets(*files.values()).hide(f"{source}: {error}")) from None
    migration.left_out[:0] = overridden
    if other is not None:
        _print_pair(*files)
    elif _waits_for_other_half(source, settings):
        return 1
    _check_free(out, force=arguments.force)
    report = _Report(files, settings, migration)
    text = report.document()
    if out is None:
        print(text, end="")
    else:
        write_output(out, text)
    return report.print_problems(yaml.safe_load(text), out)


def _check_free(out: Path | None, *, force: bool) -> None:
    """Raise CommandError if ``out`` exists and ``force`` is False. None: the result goes to standard output."""
    if out is not None and out.exists() and not force:
        raise CommandError(f"{out} already exists; give another name, or --force to overwrite it")


def _waits_for_other_half(source: Path, settings: dict[str, Any]) -> bool:
    """Return whether a configuration, of only the explorer or only the trainer of a run, is useless without the file of
    the other process. Print where to put that file.
    """
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


def _print_pair(source: Path, other: Path) -> None:
    print(
        f"{source.name} and {other.name} are the explorer and the trainer of one run: the result is the configuration "
        "of both. `trinity-mq run` starts all agents; `trinity-mq explorer`, `runner`, `operator` and `trainer` start "
        "one of them each, on any machine that reaches the broker",
        file=sys.stderr,
    )


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
    _check_free(out, force=force)
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


class _Report:
    """The migrated file, and the messages about settings that need attention. Secrets are hidden in both, except in the
    values of the migrated settings.

    Args:
        files: Settings of the files of Trinity-RFT by path.
        settings: Settings of the whole run, joined from these files.
        migration: The migrated settings.
    """

    def __init__(
        self, files: Mapping[Path, Mapping[str, Any]], settings: Mapping[str, Any], migration: Migration
    ) -> None:
        self._files = [
            (path.name, KeyLines(path.read_text(encoding="utf-8", errors="replace")), content)
            for path, content in files.items()
        ]
        self._settings = settings
        self._migration = migration
        self._secrets = Secrets(settings, *files.values())

    def document(self) -> str:
        """Return the migrated file."""
        names, count = " and ".join(name for name, _, _ in self._files), len(self._files)
        kind = "a configuration" if count == 1 else "the explorer and the trainer of one run"
        comments = {
            place: [self._secrets.hide(text) for text in texts] for place, texts in self._migration.comments.items()
        }
        lines = [
            *comment_lines(f"Written by trinity-mq migrate from {names}, {kind} of Trinity-RFT."),
            *comment_lines("Comments say what is called or set differently there; settings without one are the same."),
            "",
            as_yaml(self._migration.settings, comments).removesuffix("\n"),
        ]
        for matters, title in ((True, "Has no counterpart here:"), (False, "Is not needed here:")):
            if group := [entry for entry in self._migration.left_out if entry.matters == matters]:
                lines += ["", *comment_lines(title)]
                for entry in group:
                    line = self._secrets.hide(f"  {entry.key}: {self._shown(entry)} - {entry.reason}")
                    lines += comment_lines(line)
        return "".join(f"{line}\n" for line in lines)

    def print_problems(self, settings: dict[str, Any], out: Path | None) -> int:
        """Print the settings that need attention. Return 1 if the run lost its purpose, or if the converted
        configuration is not valid without an edit, else 0.
        """
        name, left_out = str(out) if out is not None else "the result", self._migration.left_out
        if lost := {entry.reason: entry for entry in reversed(left_out) if entry.is_purpose}:
            reasons = [f"{self._place(entry)}: {self._shown(entry)}: {entry.reason}" for entry in lost.values()]
            self._print(f"{name} cannot replace the run: {'; '.join(reversed(reasons))}")
            return 1
        lines = [("note", entry) for entry in self._migration.notes]
        lines += [("no counterpart", entry) for entry in left_out if entry.matters]
        for title, entry in lines:
            self._print(f"{title}: {self._place(entry)}: {self._shown(entry)} - {entry.reason}")
        try:
            load_stages(settings) if STAGES in settings else load_config(settings)
        except ConfigError as error:
            problems = error.problems or [Problem((), text) for text in str(error).split("\n")]
            texts = [self._with_origin(problem, error.within) for problem in problems]
            self._print(f"{name} needs an edit:{f' {texts[0]}' if len(texts) == 1 else ''}")
            for text in texts if len(texts) > 1 else ():
                self._print(f"  {text}")
            if any("plugin_dirs" in text for text in texts):
                self._print("if a plug-in has this name: --plugin-dir FOLDER names the folder of plug-ins")
            return 1
        following = f"trinity-mq validate {out}" if out else "write it with -o FILE, then trinity-mq validate it"
        self._print(f"{name} is valid; next: {following}")
        return 0

    def _print(self, line: str) -> None:
        print("".join(letter if letter.isprintable() else " " for letter in self._secrets.hide(line)), file=sys.stderr)

    def _shown(self, entry: LeftOut) -> str:
        text = self._secrets.shown(entry.key, entry.value)
        return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."

    def _place(self, entry: LeftOut) -> str:
        return self._place_of(entry.key, entry.value) or entry.key

    def _with_origin(self, problem: Problem, within: Location) -> str:
        """Return a problem of the result, with the keys of Trinity-RFT's files that the wrong settings come from."""
        text = problem.text.removeprefix("configuration: ")
        locations = [problem.location] if problem.location else [location_of(key) for key in keys_in(text)]
        origins = dict.fromkeys(self._origin_of(location, within) for location in locations)
        named = ", ".join(origin for origin in origins if origin)
        return f"{text} [from {named}]" if named else text

    def _origin_of(self, location: Location, within: Location) -> str:
        """Return the key of Trinity-RFT, with its file and line, from which a setting or the section around it was
        converted. Empty: the setting comes from a default of Trinity-RFT.
        """
        for place in dict.fromkeys([(*within, *location), location]):
            for length in range(len(place), 0, -1):
                if (origin := self._migration.origins.get(place[:length])) is not None:
                    ends = range(len(place), length - 1, -1)
                    keys = (".".join([origin, *map(str, place[length:end])]) for end in ends)
                    return next(filter(None, map(self._place_of, keys)), "")
            if same := self._place_of(".".join(map(str, place))):
                return same
        return ""

    def _place_of(self, key: str, value: Any = None) -> str:
        """Return a key of Trinity-RFT with its file and line. If several files have the key, prefer a file with the
        value that the run uses. Empty: no file has the key.
        """
        wanted = value_at(self._settings, key) if value is None else value
        places = [
            (value_at(settings, key) == wanted, f"{key} ({name} line {line})")
            for name, lines, settings in self._files
            if (line := lines.line_of_key(location_of(key))) is not None
        ]
        return max(places, key=itemgetter(0))[1] if places else ""
