"""Writes and reads the bodies of a release, with whatever ``trinity_mq`` the running Python has; ``deploy/releases.py``
and the tests run it in environments of several releases.

    python tests/golden/released.py write GOLDEN_FOLDER FILE    each golden body as this release writes it
    python tests/golden/released.py read FILE OUT               what this release finds in the bodies of another

``FILE`` is a JSON map from the name of a golden to ``body`` (base64) and ``holds`` (its JSON form, schemas/README.md).
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

sys.path[:0] = [str(Path(__file__).parent)]

from forms import batch_form, form  # noqa: E402 - found by the line above, where tests are no package

from trinity_mq.experience import decode, encode  # noqa: E402
from trinity_mq.messages import decode_any  # noqa: E402
from trinity_mq.messages import encode as encode_message  # noqa: E402

ZSTD = "zstd"
"""The golden that is compressed."""


def found(name: str, body: bytes) -> tuple[bytes, Any]:
    """Return a body as this release writes what it finds in another, and the JSON form of that."""
    if name.startswith("control/"):
        written = encode_message(decode_any(body))
        return written, form(msgpack.unpackb(written))
    experiences = decode(body)
    written = encode(experiences, compression="zstd" if name.endswith(ZSTD) else "none")
    return written, batch_form(experiences)


def written(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each golden in ``folder`` as this release writes it."""
    for path in sorted([*folder.glob("control/*.msgpack"), *folder.glob("experiences/*.tmqx")]):
        name = path.relative_to(folder).with_suffix("").as_posix()
        body, holds = found(name, path.read_bytes())
        yield name, {"body": base64.b64encode(body).decode(), "holds": holds}


def read(bodies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what this release finds in each body; an error's text where it cannot read it."""
    holds: dict[str, Any] = {}
    for name, one in bodies.items():
        try:
            holds[name] = found(name, base64.b64decode(one["body"]))[1]
        except ValueError as error:
            holds[name] = f"{type(error).__name__}: {error}"
    return holds


if __name__ == "__main__":
    command, source, target = sys.argv[1:]
    result = dict(written(Path(source))) if command == "write" else read(json.loads(Path(source).read_text()))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in result.items())
    Path(target).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
