"""The notebook in examples/, executed by a real kernel from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(500), pytest.mark.extended]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_its_cells_run_in_order_and_the_model_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), str(NOTEBOOK.parents[1] / "agents")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    client = NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert printed(code[1]).startswith("batch 20: reward ")
    assert printed(code[2]) == "130 False\n"
    assert "run notebook: 60 steps" in printed(code[3])
    lines = printed(code[4]).splitlines()
    accuracies = [float(line.split()[2]) for line in lines]
    assert [line.split(":")[0].split()[1] for line in lines] == ["0", "20", "40", "60"]
    assert accuracies[-1] > accuracies[0] + 0.1
    assert any("image/png" in output.get("data", {}) for output in code[5].outputs)
    assert "weights in" in printed(code[6])
