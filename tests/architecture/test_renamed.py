"""Old names of modules: each is importable, warns, and is in docs/renamed.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import trinity_mq
from trinity_mq.release import VERSION
from trinity_mq.renamed import NAMES, RENAMED

PAGE = Path(trinity_mq.__file__).parents[1] / "docs" / "renamed.md"


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_gives_the_new_module_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(RENAMED[old])
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=f"{RENAMED[old]}; the old name goes with release"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is spec
    assert f"| `{old}` | `{RENAMED[old]}` |" in PAGE.read_text(encoding="utf-8")


def test_a_module_of_a_renamed_package_is_found_too_and_an_unknown_one_is_not() -> None:
    with pytest.warns(DeprecationWarning, match="is now trinity_mq.engines"):
        from trinity_mq.models.engines.api_errors import ApiError
    from trinity_mq.engines import api_errors

    assert ApiError is api_errors.ApiError
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trinity_mq.nothing")
    release = tuple(int(part) for part in VERSION.split(".")[:2])
    assert release < (0, 3), "delete trinity_mq/renamed.py, its calls of install and this file"


@pytest.mark.timeout(240)
def test_old_names_of_classes_and_functions_give_the_new_ones() -> None:
    text = PAGE.read_text(encoding="utf-8")
    count = 0
    for home, words in NAMES.items():
        module = importlib.import_module(home)
        for old, new in (word.split("=") for word in words.split()):
            assert f"`{old.removeprefix('.')}` → `{new}`" in text or old == "wanted", (
                f"{home}: {old} is not on the page"
            )
            if old.startswith("."):
                owners = [cls for cls in vars(module).values() if isinstance(cls, type) and new in vars(cls)]
                assert any(vars(cls).get(old[1:]) is vars(cls)[new] for cls in owners), f"{home}: {old}"
            else:
                with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
                    assert getattr(module, old) is getattr(module, new)
            count += 1
    assert count > 300
