from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trinity_mq.config import OperatorConfig
from trinity_mq.operators import EXPERIENCE_OPERATORS, create_operators
from trinity_mq.rewards import REWARD_FUNCTIONS, UnknownNameError, create_reward, parts_of
from trinity_mq.runtime import plugins
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.plugins import Registry, add_plugins, plugin_names, registered_plugins
from trinity_mq.workflows import WORKFLOWS, load_workflow

pytestmark = pytest.mark.usefixtures("fresh_imports")


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


# -- plug-ins in the style of Trinity-RFT, registered by decorator in a folder, found by name in every process


PLUGINS = """
from typing import Optional

from trinity_mq.experience import Experience
from trinity_mq.operators import EXPERIENCE_OPERATORS, ExperienceOperator
from trinity_mq.rewards import REWARD_FUNCTIONS, RewardFn
from trinity_mq.workflows import WORKFLOWS, Task, Workflow


@WORKFLOWS.register_module("{prefix}_workflow")
class CountingWorkflow(Workflow):
    def __init__(self, *, task: Task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def run(self) -> list[Experience]:
        return []


@EXPERIENCE_OPERATORS.register_module("{prefix}_operator")
class DoublingOperator(ExperienceOperator):
    def __init__(self, factor: float = 2.0):
        self.factor = factor

    def process(self, exps):
        for exp in exps:
            exp.reward = exp.reward * self.factor
        return exps, {{"doubled": len(exps)}}


@REWARD_FUNCTIONS.register_module("{prefix}_reward")
class LengthReward(RewardFn):
    def __call__(self, response: str, prompt: Optional[str] = None, truth: Optional[str] = None, **kwargs):
        return {{"length": float(len(response)), "right": float(response == truth)}}
"""


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Write a plug-in module and add its folder; return the prefix of its names."""

    def write(file: str = "", text: str = PLUGINS) -> str:
        prefix = f"t{abs(hash(request.node.nodeid)) % 10**8}"
        (tmp_path / f"{file or prefix}_plugins.py").write_text(text.format(prefix=prefix))
        add_plugins([str(tmp_path)])
        return prefix

    return write


def test_each_is_found_by_the_name_it_registers(plugin: Callable[..., str]) -> None:
    plugin("broken", "raise RuntimeError('executed')\n")  # nothing is executed to find a name
    prefix = plugin()
    assert load_workflow(f"{prefix}_workflow").__name__ == "CountingWorkflow"
    (operator,) = create_operators([OperatorConfig(name=f"{prefix}_operator", args={"factor": 3})])
    assert operator is not None
    reward = create_reward(f"{prefix}_reward", {})
    assert parts_of(reward, "abc", "abc", finished=True) == {"length": 3.0, "right": 1.0}
    assert set(WORKFLOWS) == {name for name in WORKFLOWS if not name.startswith(prefix)}, "the built-in names stay"
    assert "reward_filter" in EXPERIENCE_OPERATORS
    assert "math_reward" in REWARD_FUNCTIONS
    with pytest.raises(UnknownNameError, match=f"did you mean '{prefix}_reward'"):
        create_reward(f"{prefix}_rewart", {})


def test_two_that_register_one_name_are_an_error(plugin: Callable[..., str]) -> None:
    plugin("first")
    prefix = plugin("second")
    with pytest.raises(UnknownNameError, match=r"registered by first_plugins.\w+ and by second_plugins.\w+: rename"):
        create_reward(f"{prefix}_reward", {})


def test_one_that_registers_a_built_in_name_is_an_error(tmp_path: Path) -> None:
    text = "@REWARD_FUNCTIONS.register_module('math_reward')\nclass R: ...\n"
    (tmp_path / "built_in_plugins.py").write_text(text)
    assert parts_of(create_reward("format_reward", {}), "x", None, finished=True)
    add_plugins([str(tmp_path)])
    with pytest.raises(UnknownNameError, match=r"'math_reward' is built in, and built_in_plugins\.R registers"):
        create_reward("math_reward", {})


@pytest.mark.parametrize(
    "line",
    [
        "@THINGS.register_module('mine')\nclass Mine: ...",
        "@THINGS.register_module(module_name='mine', force=True)\nclass Mine: ...",
        "class Mine: ...\nTHINGS.register_module('mine', Mine)",
        "class Mine: ...\nplugins.THINGS.register_module(module_name='mine', module_cls=Mine, lazy=True)",
    ],
)
def test_each_form_of_registration_is_read_without_executing_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "form_plugins.py").write_text(f"raise SystemExit\n{line}\n")
    add_plugins([str(tmp_path)])
    assert registered_plugins(["THINGS"]) == {"mine": ["form_plugins.Mine"]}
    registry = Registry({}, "THINGS")
    module = ModuleType("form_plugins")
    vars(module).update(THINGS=registry, plugins=SimpleNamespace(THINGS=registry))
    exec(line, vars(module))
    assert registry.find("thing", "mine") is vars(module)["Mine"]
    assert registry.register_module("mine", int, force=True) is int
    assert registry.find("thing", "mine") is int


def test_a_registered_name_belongs_to_one_class() -> None:
    registry = Registry({"known": "a:B"}, "THINGS")

    @registry.register_module("mine")
    class Mine:
        pass

    assert registry.find("thing", "mine") is Mine
    registry.register_module("mine")(Mine)  # a module that is imported again
    with pytest.raises(ValueError, match="'known' is a:B already"):
        registry.register_module("known")(Mine)
    with pytest.raises(ValueError, match=r"'mine' is .*Mine already"):
        registry.register_module("mine")(int)


def test_a_plugin_asks_a_registry_as_in_trinity(tmp_path: Path) -> None:
    (tmp_path / "asked_plugins.py").write_text(
        "from trinity_mq.operators import EXPERIENCE_OPERATORS\n"
        "@EXPERIENCE_OPERATORS.register_module('foreign')\nclass Foreign: ...\n"
    )
    add_plugins([str(tmp_path)])
    registry = Registry({"known": "collections:Counter"}, "EXPERIENCE_OPERATORS")
    assert registry.modules == {}
    registry.register_module("mine", int)
    assert registry.modules == {"mine": int}
    assert [registry.get(name) for name in ("known", "mine", "collections.deque", "other", None)] == [
        Counter, int, deque, None, None,
    ]  # fmt: skip
    assert registry.get("foreign").__name__ == "Foreign"
    assert registry.get("other", str) is str
    with pytest.raises(UnknownNameError, match="Nothing"):
        registry.get("collections.Nothing")


@pytest.mark.parametrize(
    "function",
    [
        lambda response, prompt, truth: {"right": float(response == truth)},
        lambda **kwargs: {"right": float(kwargs["response"] == kwargs["truth"])},
        lambda response, truth, *, finished: {"right": float(response == truth)},
        lambda response, truth=None, prompt=None, **rest: {"right": float(response == truth)},
    ],
)
def test_rewards_are_called_in_the_form_they_take(function: Any) -> None:
    reward = create_reward(function, {})
    assert parts_of(reward, "5", "5", finished=True) == {"right": 1.0}
    assert parts_of(reward, "5", "6", finished=True) == {"right": 0.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "cannot be imported: SyntaxError: "),
        ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
    ],
)
def test_a_module_that_is_there_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"broken_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UnknownNameError) as caught:
        plugins.resolve("workflow", f"{name}.Mine")
    assert words in str(caught.value)
    assert f"{name}.py:1)" in str(caught.value)
    assert "PYTHONPATH" not in str(caught.value)
