"""Writes the golden bodies that are missing: ``python tests/golden/make_goldens.py`` from the repository's root.

What exists is never touched. A golden stands for bodies that others have sent and kept: when one no longer decodes, the
reader is wrong.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import msgpack

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.golden import control_cases, experience_cases  # noqa: E402 - found by the line above
from tests.golden.forms import GOLDEN, SUMS, batch_form, form, json_text  # noqa: E402
from trinity_mq.experience import decode, encode  # noqa: E402


def make(folder: Path) -> list[str]:
    """Write the goldens that ``folder`` lacks, list their checksums and return their names.

    Raises:
        ValueError: An experience does not come back from its body as it was.
    """
    new = []
    for (kind, version), cases in control_cases.CASES.items():
        for case, fields in cases.items():
            body = {"kind": kind, "version_number": version, **fields}
            new += put(folder, f"control/{kind}.v{version}.{case}", "msgpack", msgpack.packb(body), form(body))
    for case, experiences in experience_cases.cases().items():
        compression = "zstd" if case in experience_cases.COMPRESSED else "none"
        body, shown = encode(experiences, compression=compression), batch_form(experiences)
        if json_text(batch_form(decode(body))) != json_text(shown):
            raise ValueError(f"case {case} does not come back from its body as it was")
        new += put(folder, f"experiences/v1.{case}", "tmqx", body, shown)
    return new


def put(folder: Path, name: str, kind: str, body: bytes, shown: Any) -> list[str]:
    """Write one golden and its JSON form, unless either is there."""
    files = {f"{name}.{kind}": body, f"{name}.json": json_text(shown).encode()}
    if any((folder / file).exists() for file in files):
        return []
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
        with (folder / SUMS.name).open("a", encoding="utf-8") as sums:
            sums.write(f"{hashlib.sha256(data).hexdigest()}  {file}\n")
    return [name]


if __name__ == "__main__":
    sys.stdout.writelines(f"new: {name}\n" for name in make(GOLDEN))
