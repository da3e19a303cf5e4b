"""YAML with unique keys in every mapping. PyYAML alone silently takes the last of several equal keys."""

from __future__ import annotations

from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"
"""Tag of ``<<``, which may occur several times in a mapping, since each occurrence has an effect."""


class DuplicateKeyError(yaml.YAMLError):
    """A mapping contains a key twice; the message names the key and both lines."""


class _StrictSafeLoader(yaml.SafeLoader):
    # keys are checked before merge keys are expanded, since an explicit key may override a merged key
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                line = key.start_mark.line + 1
                if first := lines.get((key.tag, key.value)):
                    where = f"in line {line}" if first == line else f"in lines {first} and {line}"
                    raise DuplicateKeyError(f"key {key.value!r} is given twice, {where}: remove one of the two")
                lines[key.tag, key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document.

    Raises:
        DuplicateKeyError: A mapping, at any depth, contains a key twice.
        yaml.YAMLError: The text is not valid YAML.
    """
    return yaml.load(text, Loader=_StrictSafeLoader)
