"""``trinity-mq init``: writes a folder with a small agent that learns, to be changed into the user's own agent."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trinity_mq.config.loading.examples import EXAMPLES, STARTER
from trinity_mq.errors import CommandError

_PURPOSES = {
    "my_agent.yaml": "the configuration",
    "my_agent.py": "the agent, its tool and its reward",
    "records.jsonl": "20 records",
    "test_my_agent.py": "the test of the agent",
    "README.md": "what to do with these files",
}
"""The files of the starter, with their purposes."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq init``."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the new folder; its name is the name of the agent")


def init(arguments: argparse.Namespace) -> int:
    """Write the folder. Return 0."""
    folder: Path = arguments.folder
    name = folder.absolute().name
    module, kind = name.replace("-", "_"), "".join(word.title() for word in name.split("-"))
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or keyword.iskeyword(kind) or _is_installed(module):
        raise CommandError(
            f"{name!r} cannot name an agent: wanted at most 40 small letters, digits and -, beginning with a letter, "
            "and no name of a module of Python or of an installed package, such as my-agent"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CommandError(f"{folder} exists and is not empty: name a new folder")
        _write(folder, {"my-agent": name, "my_agent": module, "MyAgent": kind})
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror or error}; name a new folder") from error
    for file_name, purpose in _PURPOSES.items():
        print(f"{folder / file_name.replace('my_agent', module)!s:40} {purpose}")
    print(
        f"\nnext:\n  cd {shlex.quote(str(folder))}\n"
        "  python -m unittest -b  # the test of the agent: seconds, without a broker\n"
        f"  trinity-mq run {module}.yaml  # trains the agent; one to four minutes on two cores"
    )
    return 0


def _is_installed(module: str) -> bool:
    """Return whether a module of this name is part of Python or installed, so that the agent's module would hide it. A
    module in the working folder, or in a package there, does not count.
    """
    if module in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and Path.cwd() not in Path(spec.origin).parents[:2]


def _write(folder: Path, words: Mapping[str, str]) -> None:
    """Write the files of the starter into ``folder``. Each key of ``words`` is replaced by its value in their texts."""
    for file_name in _PURPOSES:
        text = (EXAMPLES / STARTER / file_name).read_text(encoding="utf-8")
        for word, replacement in words.items():
            text = text.replace(word, replacement)
        (folder / file_name.replace("my_agent", words["my_agent"])).write_text(text, encoding="utf-8")
