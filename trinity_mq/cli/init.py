"""``trinity-mq init``: writes a folder with a small agent that learns, to be changed into the user's own agent."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
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
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise CommandError(
            f"{name!r} cannot name an agent: wanted at most 40 small letters, digits and -, beginning with a letter, "
            "and no name of a module of Python, such as my-agent"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists and is not empty: name a new folder")
    words = {"my-agent": name, "my_agent": module, "MyAgent": "".join(word.title() for word in name.split("-"))}
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, purpose in _PURPOSES.items():
        text = (EXAMPLES / STARTER / file_name).read_text(encoding="utf-8")
        for word, replacement in words.items():
            text = text.replace(word, replacement)
        target = folder / file_name.replace("my_agent", module)
        target.write_text(text, encoding="utf-8")
        print(f"{target!s:40} {purpose}")
    print(
        f"\nnext:\n  cd {folder}\n  python -m unittest -b  # the test of the agent: seconds, without a broker\n"
        f"  trinity-mq run {module}.yaml  # trains the agent; a minute on two cores"
    )
    return 0
