"""Names of the columns in an experience body, by kind."""

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

EID_IDS = ("eid.batch", "eid.task")
EID_INTS = ("eid.run", "eid.step")
EID_SUFFIX = "eid.suffix"
EID_COLUMNS = (*EID_IDS, *EID_INTS, EID_SUFFIX)

VERSIONS = "versions"
CUSTOM_FIELDS = "custom_fields"
MULTI_MODAL = "multi_modal_inputs"

PLAIN_COLUMNS = (*TEXT_COLUMNS, *INT_COLUMNS, *FLOAT_COLUMNS, *DOCUMENT_COLUMNS, VERSIONS, CUSTOM_FIELDS)
"""Fields whose columns are lists of values."""
OWN_DOCUMENTS: dict[str, type] = {"info": dict, "metrics": dict, CUSTOM_FIELDS: list}
"""Fields that every experience has; an empty value is sent as a missing value."""

DOCUMENT_TENSORS = "documents"
"""Field name of the tail's entries for tensors from documents. Their items are these tensors in order of occurrence."""

MAX_EXPERIENCES = 1 << 16
"""Maximum experiences in one body: each costs a reader about two kilobytes, however few bytes it takes."""
