"""Runs from Python: real processes, followed, stopped, gone on with, and ended with the interpreter that began them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from trinity_mq import RunError, run
from trinity_mq.config import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "api",
        "run_dir": str(folder / "run"),
        "model": {
            "tiny": {"characters": "0123456789+-=>,<"},
            "max_model_len": 32,
            "max_prompt_tokens": 16,
            "max_response_tokens": 3,
        },
        "buffer": {
            "batch_size": 8,
            "total_steps": 4,
            "taskset": {"name": "max3", "storage_type": "synthetic", "path": "max3", "reward_fn": "char_match"},
            "eval_tasksets": [
                {"name": "held", "storage_type": "synthetic", "path": "max3", "split": "test", "limit": 8}
            ],
        },
        **more,
    }


def test_what_is_wrong_is_said_where_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"buffer.batch_siz: unknown key; did you mean 'batch_size'"):
        run(settings(tmp_path), ["buffer.batch_siz=1"])
    with pytest.raises(ConfigError, match="holds stages"):
        run(settings(tmp_path, stages=[{"stage_name": "a"}]))
    assert not (tmp_path / "run").exists()
    broken = settings(tmp_path)
    broken["buffer"] = {**broken["buffer"], "taskset": {"storage_type": "file", "path": str(tmp_path / "none.jsonl")}}
    with pytest.raises(RunError, match=r"exit code 2: .*none.jsonl"):
        run(broken).wait(60.0)


def test_the_run_ends_with_the_interpreter_that_began_it(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(settings(tmp_path)))
    program = (
        "import json, sys, trinity_mq\n"
        f"handle = trinity_mq.run(json.load(open({str(tmp_path / 'settings.json')!r})), ['buffer.total_steps=4000'])\n"
        "next(line for line in handle.metrics() if 'trainer/step' in line.values)\n"
        "print(handle.process.pid, flush=True)\n"
        "handle.wait()\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed leaves its temporary files
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as notebook:
        assert notebook.stdout is not None
        started = psutil.Process(int(notebook.stdout.readline()))
        family = [started, *started.children(recursive=True)]
        assert len(family) > 4
        os.kill(notebook.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60.0)
    assert alive == []
