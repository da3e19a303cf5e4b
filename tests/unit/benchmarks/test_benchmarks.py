"""The benchmarks that need no broker still run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench_codec.py", ("encode", "decode to a list", "decode to a batch", "copying the body", "zstd")),
        ("bench_gather.py", ("gather_token_ids", "group_by", "split_dpo")),
        ("bench_checkpoint.py", ("written at once", "copied, first time", "copied, later", "written beside steps")),
        ("bench_trainer.py speed", ("bare loop, packed", "trinity-mq, packed", "TRL")),
        ("bench_sync.py", ("collective", "checkpoint", "memory", "plain broadcast", "plain copy")),
    ],
)
def test_quick_run(command, said):
    script, *parts = command.split()
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *parts, "--quick"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [word for word in said if word not in result.stdout] == []
