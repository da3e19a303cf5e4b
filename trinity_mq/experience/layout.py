"""Which fields of an experience travel in which kind of column."""

from __future__ import annotations

TEXT_COLUMNS = ("experience_type", "truncate_status", "response_text", "prompt_text", "taskset")
INT_COLUMNS = ("prompt_length", "index")
FLOAT_COLUMNS = ("reward", "temperature")
DOCUMENT_COLUMNS: dict[str, type] = {
    "info": dict,
    "metrics": dict,
    "messages": list,
    "tools": list,
    "chosen_messages": list,
    "rejected_messages": list,
}

EID_IDS = ("batch", "task")
EID_INTS = ("run", "step")
EID_PREFIX = "eid."
"""Before the name of a part of the id."""

VERSIONS = "versions"
CUSTOM_FIELDS = "custom_fields"
MULTI_MODAL = "multi_modal_inputs"

DOCUMENT_TENSORS = "documents"
"""Field of the tail's entries for tensors found in documents; their items are those tensors in the order found."""
