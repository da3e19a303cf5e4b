"""Writes ``harmony.json``, the renderings of OpenAI's reference encoder.

Run ``python tests/golden/families/make_harmony.py`` from the repository's root.

The package openai-harmony reads the vocabulary ``o200k_base.tiktoken`` from the folder ``TIKTOKEN_ENCODINGS_BASE``. The
npm package js-tiktoken holds it in ``dist/ranks/o200k_base.cjs``: there a line ``! START TOKEN TOKEN ...`` gives tokens
with ranks from START on, and the file asked for here has a line ``TOKEN RANK`` for each.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3])]

from openai_harmony import (  # noqa: E402
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
    load_harmony_encoding,
)

from tests.golden.families.conversations import CASES  # noqa: E402

DATE = "2026-01-02"
EFFORTS = {"low": ReasoningEffort.LOW, "medium": ReasoningEffort.MEDIUM, "high": ReasoningEffort.HIGH}


def conversation(case: Any, effort: str, date: str = DATE) -> Conversation:
    """Return a conversation in the form of the encoder."""
    system = SystemContent.new().with_reasoning_effort(EFFORTS[effort]).with_conversation_start_date(date)
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    instructions = "".join(message["content"] for message in case.messages if message["role"] == "system")
    if instructions or case.tools:
        developer = DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions)
        if case.tools:
            functions = [tool["function"] for tool in case.tools]
            developer = developer.with_function_tools(
                [ToolDescription.new(each["name"], each["description"], each["parameters"]) for each in functions]
            )
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    for message in case.messages:
        messages += converted(message)
    return Conversation.from_messages(messages)


def converted(message: dict[str, Any]) -> list[Message]:
    """Return the messages of the encoder for one message of the API."""
    text = message["content"]
    if message["role"] == "user":
        return [Message.from_role_and_content(Role.USER, text)]
    if message["role"] == "tool":
        author = Author.new(Role.TOOL, f"functions.{message['name']}")
        sent = Message.from_author_and_content(author, text)
        return [sent.with_channel("commentary").with_recipient("assistant")]
    if message["role"] != "assistant":
        return []
    parts = []
    if thoughts := message.get("reasoning_content"):
        parts.append(Message.from_role_and_content(Role.ASSISTANT, thoughts).with_channel("analysis"))
    calls = message.get("tool_calls", [])
    if text or not calls:
        channel = "commentary" if calls else "final"
        parts.append(Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel))
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        made = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
        parts.append(
            made.with_recipient(f"functions.{call['function']['name']}").with_content_type("<|constrain|>json")
        )
    return parts


def main() -> None:
    """Write the file."""
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    config = RenderConversationConfig(auto_drop_analysis=True)
    rendered: dict[str, dict[str, Any]] = {}
    for effort in EFFORTS:
        for title, case in CASES.items():
            asked = conversation(case, effort)
            prompt = encoding.render_conversation_for_completion(asked, Role.ASSISTANT, config)
            whole = encoding.render_conversation_for_training(asked, config)
            rendered.setdefault(effort, {})[title] = {
                "prompt": encoding.decode_utf8(prompt),
                "whole": encoding.decode_utf8(whole),
            }
    file = Path(__file__).with_name("harmony.json")
    made = {"package": f"openai-harmony {version('openai-harmony')}", "licence": "Apache-2.0", "date": DATE}
    file.write_text(json.dumps({**made, "rendered": rendered}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
