"""schemas/README.md says what is so."""

from __future__ import annotations

import re

from tests.golden.forms import EXPERIENCES, GOLDEN
from trinity_mq.experience.codec import body as codec
from trinity_mq.experience.codec import columns, documents, layout, tail
from trinity_mq.experience.fields import TENSOR_FIELDS
from trinity_mq.messages import decode, msgpack_scan
from trinity_mq.messages.codec import JSON_CONTENT_TYPE
from trinity_mq.messages.tasks import TaskSubmission
from trinity_mq.runtime.deliveries import EXPERIENCES as EXPERIENCES_TYPE
from trinity_mq.runtime.deliveries import REFERENCE

README = (GOLDEN.parent / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return found


def section(title: str) -> str:
    return re.split(r"^#+ ", README.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_dump_is_the_golden_body_byte_by_byte() -> None:
    body = bytearray()
    for line in block("hexdump").splitlines():
        match = re.fullmatch(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?: {2,}(\S.*))?", line)
        assert match, line
        assert int(match[1], 16) == len(body), f"a gap or an overlap before {line}"
        body += bytes.fromhex(match[2])
    assert bytes(body) == (EXPERIENCES / "v1.tiny.tmqx").read_bytes()


def test_the_example_of_a_submission_decodes() -> None:
    message = decode(block("json").encode(), TaskSubmission, JSON_CONTENT_TYPE)
    assert message.want_experiences
    assert message.task.raw_task == {"question": "+372=", "answer": "7"}


def test_limits_and_content_types_are_those_of_the_code() -> None:
    rows = {
        "experiences in a body": layout.MAX_EXPERIENCES,
        "lists and maps in all documents of a body": documents.MAX_CONTAINERS,
        "nesting of a document": msgpack_scan.MAX_NESTING,
        "tensors that a body is split into": tail.MAX_TENSORS,
        "header of the tail, bytes": tail.MAX_HEADER_BYTES,
        "dimensions of a tensor": tail.MAX_DIMENSIONS,
    }
    for words, limit in rows.items():
        assert re.search(rf"^\| {words} \| {limit}\b", section("Limits"), re.MULTILINE), words
    assert f"{codec.MAX_EXPANSION} times its compressed bytes plus {codec.FREE_EXPANSION}" in README
    assert f"more than {msgpack_scan.MAX_NESTING} levels of nesting" in README
    assert f"more than {msgpack_scan.MAX_CONTAINERS} lists and maps" in README
    assert f"and {len(TENSOR_FIELDS)} for each experience besides" in README
    for name in (codec.CONTENT_TYPE, EXPERIENCES_TYPE, REFERENCE, JSON_CONTENT_TYPE):
        assert f"`{name}`" in section("Content types and headers")


def test_every_column_field_and_dtype_is_told() -> None:
    told = set(re.findall(r"`([^`]+)`", section("Head")))
    names = {*layout.PLAIN_COLUMNS, *layout.EID_COLUMNS, layout.MULTI_MODAL, layout.DOCUMENT_TENSORS}
    assert names | TENSOR_FIELDS.keys() <= told
    listed = section("Tail").split("Dtypes: ")[1].split(" (")[0]
    assert listed.replace("\n", " ").split(", ") == list(tail.DTYPES)
    forms = re.findall(r"^\* ``(\w)``", columns.__doc__ or "", re.MULTILINE)
    assert set(forms) <= told
