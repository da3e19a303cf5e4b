"""Table of the model families."""

from __future__ import annotations

from trinity_mq.families import hermes, json_calls
from trinity_mq.families.family import PARTS, Family
from trinity_mq.families.library import calls_reader
from trinity_mq.families.thoughts import GEMMA4, HARMONY, HARMONY_HEADERS, MISTRAL
from trinity_mq.runtime.plugins import UnknownNameError, resolve

row = Family
"""Another name of :class:`Family`, for the rows of users' own families."""
_TOOL_CALL = (hermes.CALL_BEGINS,)
FAMILIES = (
    row(
        "deepseek",
        json_calls.read_deepseek_calls,
        (json_calls.DEEPSEEK_BEGINS,),
        marks=("+ tool['function']['arguments'] +",),
        library=("deepseek-v3", "deepseek-r1"),
        grammar="deepseek_r1",
        arguments="text",
    ),
    row(
        "deepseek-v3.1",
        json_calls.read_deepseek_calls,
        (json_calls.DEEPSEEK_BEGINS,),
        marks=(json_calls.DEEPSEEK_BEGINS,),
        grammar="deepseek_v3_1",
    ),
    row(
        "glm",
        calls_reader("glm-5"),
        _TOOL_CALL,
        marks=("<arg_key>",),
        library=("glm-4.5", "glm-5", "glm-5.3"),
        grammar="glm_4_7",
    ),
    row(
        "minimax",
        calls_reader("minimax-m2"),
        ("<minimax:tool_call>",),
        marks=("<minimax:tool_call>",),
        library=("minimax-m2",),
    ),
    row(
        "nemotron",
        calls_reader("nemotron-3"),
        _TOOL_CALL,
        marks=("<function=", "truncate_history_thinking"),
        library=("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        grammar="qwen_3_5",
    ),
    # Qwen3.5, Qwen3.6, Qwen3.8 and Qwen3-Coder
    row(
        "qwen3.5",
        calls_reader("qwen3.5"),
        _TOOL_CALL,
        marks=("<function=",),
        library=("qwen3.5", "qwen3.6", "qwen3.8"),
        grammar="qwen_3_5",
    ),
    row(
        "kimi",
        calls_reader("kimi-k2"),
        ("<|tool_calls_section_begin|>",),
        marks=("<|tool_calls_section_begin|>",),
        library=("kimi-k2", "kimi-k2.5"),
        grammar="kimi",
    ),
    row(
        "gpt-oss",
        json_calls.read_harmony_calls,
        json_calls.HARMONY_BEGINS,
        thoughts=HARMONY,
        headers=HARMONY_HEADERS,
        marks=("<|channel|>", "<|message|>"),
    ),
    row(
        "gemma4",
        calls_reader("gemma4"),
        ("<|tool_call>",),
        thoughts=GEMMA4,
        marks=("<|tool_call>", "<|channel>"),
        library=("gemma4",),
    ),
    row(
        "mistral",
        json_calls.read_mistral_calls,
        (json_calls.MISTRAL_BEGINS,),
        thoughts=MISTRAL,
        thoughts_key=PARTS,
        marks=("[TOOL_CALLS]",),
        call_id=json_calls.mistral_call_id,
    ),
    row(
        "llama",
        json_calls.read_llama_calls,
        json_calls.LLAMA_BEGINS,
        marks=("<|start_header_id|>",),
        library=("llama-3",),
        grammar="llama",
    ),
    row("gemma", hermes.read_calls, _TOOL_CALL, marks=("<start_of_turn>",), grammar="qwen_3"),
    row("phi", json_calls.read_phi_calls, json_calls.PHI_BEGINS, marks=("<|end|>", "<|assistant|>")),
    # Hermes, Qwen2.5, Qwen3, and every template without a family of its own
    row("hermes", hermes.read_calls, _TOOL_CALL, library=("qwen3", "qwen3-vl"), grammar="qwen_3"),
)
"""Model families by their chat templates. The first row whose marks all occur in a template applies."""


ENTRY_GROUP = "trinity_mq.families"
"""Entry-point group under which installed packages add families."""


def find_family(name: str) -> Family:
    """Return the family with this name: a row of the table, a name under :data:`ENTRY_GROUP`, or a dotted path.

    Raises:
        UnknownNameError: The name does not exist, or does not refer to a :class:`Family`.
    """
    rows = {family.name: family for family in FAMILIES}
    if name in rows:
        return rows[name]
    table = dict.fromkeys(rows, f"{__name__}:FAMILIES")  # for the suggestions of the error
    family = resolve("model family", name, table, ENTRY_GROUP)
    if not isinstance(family, Family):
        raise UnknownNameError(
            f"model family {name!r} is {family!r:.80}, wanted a trinity_mq.families.family.Family, such as "
            'MINE = row("mine", read_calls, ("<call>",))'
        )
    return family


def has_row(template: str) -> bool:
    """Return whether the table has a row for a chat template: a row with marks, or the last row if the template
    contains the beginning of its calls.
    """
    family = family_of(template)
    return bool(family.marks) or any(mark in template for mark in family.calls_begin)


def family_of(template: str) -> Family:
    """Return the family of a chat template."""
    return next(family for family in FAMILIES if all(mark in template for mark in family.marks))
