"""Imports of Trinity-RFT's plug-ins: the table, the page, the error about such an import, and the rewritten file.

``python tests/unit/trinity_rft/test_imports.py`` writes the tables of the page.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.config.trinity_imports import ANY, counterpart, required_imports, trinity_imports
from trinity_mq.runtime.plugins import UnknownNameError, add_plugins, resolve
from trinity_mq.trinity_rft.migration.imports import PluginSyntaxError, migrate_plugin
from trinity_mq.workflows import WORKFLOWS

PAGE = Path(__file__).parents[3] / "docs" / "from-trinity.md"
BEGIN, END = "<!-- imports.csv -->\n", "<!-- end of imports.csv -->\n"
IMPORTED = [row for row in trinity_imports() if row.new_module]


def tables() -> Iterator[str]:
    """Yield the lines of the page's tables, one for each module there and each module here or reason."""
    here: dict[tuple[str, str], list[str]] = {}
    absent: dict[tuple[str, str], list[str]] = {}
    for row in trinity_imports():
        name = "all names" if row.name == ANY else f"`{row.name}`"
        if row.new_module:
            renamed = "" if row.new_name == row.name else f" (`{row.new_name}`)"
            here.setdefault((row.module, row.new_module), []).append(name + renamed)
        else:
            absent.setdefault((row.module, row.comment), []).append(name)
    yield from ("| Module there | Names, with ours where they differ | Module here |", "|---|---|---|")
    for (module, new_module), names in here.items():
        yield f"| `{module}` | {', '.join(names)} | `{new_module}` |"
    yield from ("", "Names without a counterpart:", "", "| Module there | Names | Reason |", "|---|---|---|")
    for (module, reason), names in absent.items():
        yield f"| `{module}` | {', '.join(names)} | {reason} |"


def test_the_page_lists_every_name() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == "".join(f"{line}\n" for line in tables())


@pytest.mark.timeout(240)  # it imports most of the library
def test_every_import_of_the_table_works() -> None:
    for row in IMPORTED:
        assert hasattr(importlib.import_module(row.new_module), row.new_name), row


def test_each_name_has_a_row_of_its_own_and_an_import_or_a_reason() -> None:
    rows = trinity_imports()
    assert len({(row.module, row.name) for row in rows}) == len(rows)
    for row in rows:
        assert bool(row.new_module) == bool(row.new_name), row
        assert row.new_module or row.comment, row


@pytest.mark.parametrize(
    ("module", "name", "here"),
    [
        ("trinity.common.workflows", "WORKFLOWS", ("trinity_mq.workflows", "WORKFLOWS")),
        ("trinity.common.workflows.customized_math_workflows", "Task", ("trinity_mq.workflows", "Task")),
        ("trinity.common.config", "GenerationConfig", ("trinity_mq.workflows", "RolloutArgs")),
        ("trinity.plugins.my_helper", "anything", ("my_helper", "anything")),
        ("trinity.utils.registry", "Registry", ("", "")),
        ("trinity.trainer.verl.losses", "TrinityPolicyLoss", ("", "")),
        ("trinity.unheard.of", "Name", ("", "")),
    ],
)
def test_a_name_is_looked_up_by_module_then_by_its_only_import(module: str, name: str, here: tuple[str, str]) -> None:
    row = counterpart(module, name)
    assert (row.new_module, row.new_name) == here
    assert here[0] or row.comment


OLD = '''\
"""A plug-in."""
# trinity.common.workflows stays in comments
from typing import Dict
from trinity.common.experience import (
    EID,  # the id
    Experience,
)
from trinity.common.workflows import WORKFLOWS, Workflow as Base
from trinity.common.workflows.math_rm_workflow import MathRMWorkflow; import os
from trinity.common.config import FormatConfig, Config  # both

NAME = "trinity.common.workflows"


def late():\t
    if os.name: from trinity.utils.log import get_logger
    from trinity.common.constants import PromptType, SyncMethod
    return PromptType,   SyncMethod
'''
NEW = '''\
"""A plug-in."""
# trinity.common.workflows stays in comments
from typing import Dict
from trinity_mq.experience import (
    EID,  # the id
    Experience,
)
from trinity_mq.workflows import WORKFLOWS, Workflow as Base
from trinity_mq.workflows.builtin.trinity import MathRMWorkflow; import os
from trinity_mq.workflows import FormatArgs as FormatConfig
from trinity_mq.config import Config  # both

NAME = "trinity.common.workflows"


def late():\t
    if os.name: from trinity_mq.telemetry import get_logger
    from trinity_mq.data.formatters import PromptType
    from trinity.common.constants import SyncMethod
    return PromptType,   SyncMethod
'''


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_only_import_lines_change(end: str, mark: bytes) -> None:
    plugin = migrate_plugin(mark + OLD.replace("\n", end).encode())
    assert plugin.source == mark + NEW.replace("\n", end).encode()
    assert [(line, name) for line, name, _ in plugin.missing] == [(17, "trinity.common.constants.SyncMethod")]
    assert [line for line, _ in plugin.lines] == [4, 8, 9, 10, 16, 17]
    again = migrate_plugin(plugin.source)
    assert (again.source, again.lines) == (plugin.source, ())


def test_a_file_of_another_encoding_keeps_its_bytes() -> None:
    text = "# -*- coding: latin-1 -*-\nx = 'é'; from trinity.common.workflows import Task  # é\n".encode("latin-1")
    assert migrate_plugin(text).source == text.replace(b"trinity.common.workflows", b"trinity_mq.workflows")


@pytest.mark.parametrize("text", [b"from trinity import (", b"\xff\xfe", b"a\0b", b"# coding: none\n"])
def test_a_file_that_is_not_python_is_refused(text: bytes) -> None:
    with pytest.raises(PluginSyntaxError, match="it is not valid Python"):
        migrate_plugin(text)


def test_whole_modules_and_stars_are_named() -> None:
    text = b"import trinity.utils.log as log\nfrom trinity.common.rewards import *\n"
    text += b"import trinity_mq, trinity.plugins.a as b\nfrom trinity.common.constants import (\n    SyncMethod,\n)\n"
    plugin = migrate_plugin(text)
    assert plugin.source == text.replace(b"trinity_mq, trinity.plugins.a as b", b"trinity_mq, a as b")
    assert [(line, name) for line, name, _ in plugin.missing] == [
        (1, "trinity.utils.log"), (2, "trinity.common.rewards.*"), (5, "trinity.common.constants.SyncMethod"),
    ]  # fmt: skip


def test_the_command_writes_the_file_and_exits_1_for_a_missing_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "mine.py", tmp_path / "new.py"
    old.write_text(OLD)
    assert main(["migrate", str(old), "-o", str(new)]) == 1
    assert new.read_text() == NEW
    errors = capsys.readouterr().err
    assert f"no counterpart: {old}:17: trinity.common.constants.SyncMethod - settings have plain texts" in errors
    old.write_text("from trinity.common.workflows import Task\n")
    assert main(["migrate", str(old), "-o", str(new)]) == 2, "an existing file is kept"
    assert main(["migrate", str(old), "-o", str(new), "--force"]) == 0
    assert new.read_text() == "from trinity_mq.workflows import Task\n"
    assert main(["migrate", str(old)]) == 0
    assert capsys.readouterr().out == "from trinity_mq.workflows import Task\n"


PLUGIN = """
{imports}
from trinity_mq.workflows import WORKFLOWS, Workflow

@WORKFLOWS.register_module("old_imports_workflow")
class Mine(Workflow):
    def run(self):
        return []
"""


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("from trinity.common.experience import EID", r"write `from trinity_mq\.experience import EID`"),
        (
            "from trinity.utils.log import get_logger as log",
            r"`from trinity_mq\.telemetry import get_logger as log`",
        ),
        (
            "from trinity.utils.monitor import MONITOR",
            r"trinity\.utils\.monitor\.MONITOR has no counterpart",
        ),
        ("import trinity.common.config", r"trinity\.common\.config has no counterpart: a module as a whole"),
    ],
)
def test_a_plugin_with_an_import_of_trinity_names_the_new_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, advice: str
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    file = tmp_path / "plugin_old_imports.py"
    file.write_text(PLUGIN.format(imports=line))
    add_plugins([str(tmp_path)])
    message = rf"plugin_old_imports\.py:2 has an import of Trinity-RFT, `.*`: .*{advice}.*trinity-mq migrate (.*) -o "
    with pytest.raises(UnknownNameError, match=message) as caught:
        resolve("workflow", "old_imports_workflow", WORKFLOWS)
    match = re.search(message, str(caught.value))
    assert match, "the command names the file from where the user is"
    assert Path(match[1]).resolve() == file
    assert "in plugin_dirs there is" not in str(caught.value)


@pytest.mark.usefixtures("fresh_imports")
def test_a_helper_of_a_plugin_with_such_an_import_names_the_new_line(tmp_path: Path) -> None:
    (tmp_path / "plugin_new_imports.py").write_text(PLUGIN.format(imports="from _helper_old_imports import EID"))
    (tmp_path / "_helper_old_imports.py").write_text("\n\nfrom trinity.common.experience import EID\n")
    add_plugins([str(tmp_path)])
    with pytest.raises(UnknownNameError, match=r"_old_imports\.py:3 has an import of .*from trinity_mq\.experience"):
        resolve("workflow", "old_imports_workflow", WORKFLOWS)


@pytest.mark.usefixtures("fresh_imports")
def test_a_plugin_for_both_systems_is_imported(tmp_path: Path) -> None:
    there, here = "from trinity.common.experience import EID", "from trinity_mq.experience import EID"
    both = f"try:\n    {there}\nexcept ImportError:\n    {here}"
    (tmp_path / "plugin_both_systems.py").write_text(PLUGIN.format(imports=both))
    add_plugins([str(tmp_path)])
    assert resolve("workflow", "old_imports_workflow", WORKFLOWS).__module__ == "plugin_both_systems"


def test_a_migrated_plugin_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    old = "from trinity.common.workflows import WORKFLOWS, Workflow\nfrom trinity.utils.log import get_logger\n"
    rest = 'log = get_logger(__name__, in_ray_actor=True)\n@WORKFLOWS.register_module("w")\nclass W(Workflow): ...\n'
    (tmp_path / "mine.py").write_bytes(migrate_plugin((old + rest).encode()).source)
    code = "import mine; log = mine.log; log.info('ready'); print(mine.WORKFLOWS.added())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=55
    )
    assert "['w']" in result.stdout


def test_an_import_behind_a_long_expression_is_seen() -> None:
    source = f"text = {' + '.join(['b'] * 2000)}\nfrom trinity.common.workflows import Workflow\n"
    assert [node.lineno for node in required_imports(ast.parse(source))] == [2]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    text = before + BEGIN + "".join(f"{line}\n" for line in tables()) + END + rest.partition(END)[2]
    PAGE.write_text(text, encoding="utf-8")
