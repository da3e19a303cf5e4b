"""``trinity-mq migrate``: converts a Trinity-RFT configuration into a trinity_mq configuration, and the import lines of
a plug-in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.load import STAGES, read_file
from trinity_mq.errors import CommandError
from trinity_mq.terminal import write_output
from trinity_mq.trinity_rft.migration import LeftOut, Migration, as_yaml, comment_lines, migrate
from trinity_mq.trinity_rft.migration.imports import PluginSyntaxError, migrate_plugin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq migrate``."""
    parser.add_argument(
        "source",
        type=Path,
        help="configuration of Trinity-RFT, YAML, or a plug-in, .py, whose import lines are rewritten",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where to write ours; default: standard output")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def migrate_file(arguments: argparse.Namespace) -> int:
    """Write the converted configuration. Print on stderr its missing counterparts and whether it is valid."""
    source, out = arguments.source, arguments.out
    if source.suffix == ".py":
        return _migrate_plugin(source, out, force=arguments.force)
    try:
        migration = migrate(read_file(source))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    if out is not None and out.exists() and not arguments.force:
        raise CommandError(f"{out} already exists; give another name, or --force to overwrite it")
    text = "".join(f"{line}\n" for line in _header(source)) + "\n" + as_yaml(migration.settings, migration.comments)
    text += "".join(f"{line}\n" for line in _footer(migration))
    if out is None:
        print(text, end="")
    else:
        write_output(out, text)
    return _report(migration, yaml.safe_load(text), out)


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


def _header(source: Path) -> Iterator[str]:
    yield from comment_lines(f"Written by trinity-mq migrate from {source.name}, a configuration of Trinity-RFT.")
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


def _report(migration: Migration, settings: dict[str, Any], out: Path | None) -> int:
    """Print the settings that need attention. Return 1 if the converted configuration is not valid without an edit,
    else 0.
    """
    name = str(out) if out is not None else "the result"
    for entry in migration.left_out:
        if entry.matters:
            print(f"no counterpart: {entry.key}: {_short(entry.value)} - {entry.reason}", file=sys.stderr)
    try:
        load_stages(settings) if STAGES in settings else load_config(settings)
    except ConfigError as error:
        print(f"{name} needs an edit:\n{str(error).replace('configuration: ', '  ')}", file=sys.stderr)
        return 1
    following = (
        f"trinity-mq validate {out}" if out is not None else "write it with -o FILE, then trinity-mq validate it"
    )
    print(f"{name} is valid; next: {following}", file=sys.stderr)
    return 0
