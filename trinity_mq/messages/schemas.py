"""JSON Schemas (draft 2020-12) of the control-plane bodies, generated from their models."""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from trinity_mq.messages.base import Message
from trinity_mq.messages.codec import CATALOGUE
from trinity_mq.messages.status import STATUS_BY_ROLE
from trinity_mq.messages.telemetry import Heartbeat

_ROLE = re.compile(r":\w+:`(?:\w+\.)*(\w+)`")


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of every body in the catalogue, by ``<kind>.v<version>``.

    The schemas describe what a writer may send. Readers also accept unknown fields. In JSON they accept text for a
    number that JSON or the writer's language cannot hold.
    """
    return {f"{kind}.v{version}": _schema(cls) for (kind, version), cls in CATALOGUE.items()}


def _schema(cls: type[Message]) -> dict[str, Any]:
    generated = cls.model_json_schema(schema_generator=_Generator)
    names = {"kind": {"const": cls.kind}, "version_number": {"const": cls.version_number}}
    result = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "$id": f"urn:trinity-mq:schema:{cls.kind}:{cls.version_number}",
        **_open(generated),
        "properties": names | generated["properties"],
        "required": [*names, *generated.get("required", [])],
    }
    if "$defs" in generated:
        result["$defs"] = {name: _open(part) for name, part in generated["$defs"].items()}
    if cls is Heartbeat:
        result["properties"]["detail"] = {
            "type": "object",
            "description": generated["properties"]["detail"]["description"],
        }
        result["allOf"] = [
            {
                "if": {"properties": {"role": {"const": role}}},
                "then": {"properties": {"detail": {"$ref": f"#/$defs/{status.__name__}"}}},
            }
            for role, status in STATUS_BY_ROLE.items()
        ]
    plain: dict[str, Any] = _plain_words(result)
    return plain


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema that permits unknown properties, because readers ignore them."""
    first = {key: schema[key] for key in ("title", "description", "type") if key in schema}
    return first | schema | {"additionalProperties": True}


def _plain_words(part: Any) -> Any:
    """Return a part of a schema with its descriptions on one line and without Python markup."""
    if isinstance(part, list):
        return [_plain_words(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _sentence(value) if key == "description" and isinstance(value, str) else _plain_words(value)
        for key, value in part.items()
    }


def _sentence(text: str) -> str:
    return _ROLE.sub(r"`\1`", " ".join(text.split())).replace("``", "`")
