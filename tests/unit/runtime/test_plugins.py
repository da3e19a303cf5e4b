from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.runtime import plugins
from trinity_mq.runtime.errors import EXIT_FATAL, FatalError
from trinity_mq.runtime.plugins import add_plugins, plugin_names


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds the interpreter as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_added", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_a_folder_can_be_imported_and_are_not_executed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "plugin_echo.py").write_text(
        "from plugin_helper import VALUE\nclass Echo:\n    value = VALUE\n"
    )
    (tmp_path / "mine" / "plugin_helper.py").write_text("VALUE = 7\n")
    (tmp_path / "mine" / "plugin_broken.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.chdir(tmp_path)
    assert add_plugins(["mine"]) == [tmp_path / "mine"], "relative to where the process was started"
    add_plugins([str(tmp_path / "mine"), str(tmp_path / "mine" / ".." / "mine")])
    import plugin_echo  # type: ignore[import-not-found]

    assert plugin_echo.Echo.value == 7
    assert sys.path[-1] == str(tmp_path / "mine"), "behind everything else"
    assert sys.path.count(sys.path[-1]) == 1


def test_classes_are_listed_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "plugin_two.py").write_text("raise SystemExit\nclass One: ...\nclass _Hidden: ...\nclass Two: ...\n")
    (tmp_path / "plugin_bad.py").write_text("class (:\n")
    (tmp_path / "plugin_null.py").write_bytes(b"class A: pass\0")
    (tmp_path / "_plugin_private.py").write_text("class Three: ...\n")
    (tmp_path / "no-module.py").write_text("class Four: ...\n")
    (tmp_path / "plugin_text.txt").write_text("class Five: ...\n")
    add_plugins([str(tmp_path)])
    assert plugin_names() == ["plugin_two.One", "plugin_two.Two"]


def test_a_missing_folder_is_one_line_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match=r"plugin_dirs: there is no folder 'nowhere' \(.*nowhere\); relative folders"):
        add_plugins(["nowhere"])
    (tmp_path / "file.py").write_text("")
    with pytest.raises(FatalError, match="there is no folder"):
        add_plugins([str(tmp_path / "file.py")])


@pytest.mark.parametrize("name", ["random", "trinity_mq", "pytest", "plugin_same"])
def test_a_file_that_another_module_hides_is_refused(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{'mine' if folder == 'a' and name != 'plugin_same' else name}.py").write_text("")
    with pytest.raises(FatalError, match=rf"another module of the same name .* hides .*b/{name}\.py"):
        add_plugins([str(tmp_path / "a"), str(tmp_path / "b")])


CHILDREN = """
import multiprocessing, sys
from trinity_mq.runtime.plugins import add_plugins

def child(pipe):
    import plugin_child
    pipe.send(plugin_child.VALUE)

if __name__ == "__main__":
    add_plugins([sys.argv[1]])
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    print(ours.recv() if ours.poll(30) else "nothing")
    process.join()
"""


def test_processes_of_slices_find_them_too(tmp_path: Path) -> None:
    """As the isolated slices are started: by a fork server."""
    assert "forkserver" in multiprocessing.get_all_start_methods()
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "plugin_child.py").write_text("VALUE = 'found'\n")
    (tmp_path / "main.py").write_text(CHILDREN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "plugins")],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_an_agent_without_its_folder_ends_with_one_line(tmp_path: Path) -> None:
    text = f"run_dir: {tmp_path / 'run'}\nmodel: {{tiny: {{}}}}\nplugin_dirs: [nowhere]\n"
    (tmp_path / "config.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "runner", str(tmp_path / "config.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={**os.environ, "TRINITY_MQ_BROKER_URL": "amqp://guest:guest@127.0.0.1:9/"},
    )
    assert done.returncode == EXIT_FATAL
    assert "plugin_dirs: there is no folder 'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr
