"""``trinity-mq settings``: prints a reference of all settings, generated from the configuration models."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from trinity_mq.config import Config
from trinity_mq.config.settings_table import all_settings, page, tables
from trinity_mq.errors import CommandError
from trinity_mq.terminal import write_output

PAGE = Path("docs/settings.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq settings``."""
    parser.add_argument("section", metavar="SECTION", nargs="?", default="", help="such as buffer; default: all")
    parser.add_argument("--out", metavar="FILE", help=f"write the whole page to this file, such as {PAGE}")


def settings(arguments: argparse.Namespace) -> int:
    """Print all settings, the settings of a section or a single setting, or write the whole page to the file of
    ``--out``. Return 0.
    """
    if arguments.out is not None:
        write_output(Path(arguments.out), page())
        return 0
    start = f"{arguments.section}." if arguments.section else ""
    selection = [setting for setting in all_settings() if f"{setting.key}.".startswith(start)]
    if not selection:
        titles = ", ".join(title for title, _, _ in tables(Config, "", {}) if title)
        raise CommandError(f"there is no section or setting {arguments.section!r}; known sections: {titles}")
    for setting in selection:
        default = setting.default and f"default {setting.default}"
        print(f"{setting.key}  ({', '.join(part for part in (setting.type, setting.unit, default) if part)})")
        print(textwrap.fill(setting.meaning.replace("`", ""), 100, initial_indent="    ", subsequent_indent="    "))
    return 0
