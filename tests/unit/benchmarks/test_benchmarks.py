"""The benchmarks that need no broker still run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("bench_codec.py", ("encode", "decode to a list", "decode to a batch", "copying the body", "zstd")),
        ("bench_gather.py", ("gather_token_ids", "group_by", "split_dpo")),
        ("bench_sync.py", ("collective", "checkpoint", "memory", "plain broadcast", "plain copy")),
    ],
)
def test_quick_run(script, said):
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--quick"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [word for word in said if word not in result.stdout] == []
