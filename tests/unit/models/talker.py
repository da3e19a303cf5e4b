"""A tiny model taught one conversation by heart: it calls a tool, hears the result, and answers."""

from pathlib import Path
from typing import Any

import torch

from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models.model_folder import ensure_model_folder

CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }}={% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>{% endfor %}'
    "{% if message.role == 'assistant' %}<eos>{% else %};{% endif %}{% endfor %}"
)
QUESTION = {"role": "user", "content": "2+3?"}
CALL = 'Let me see: <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SAID = "Let me see:"
RESULT = "5"
ANSWER = "It is 5."
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL_ID = "call_x"
STEPS = 90
WHOLE = f"[add]2+3?;{CALL}<eos>({CALL_ID}={RESULT};{ANSWER}<eos>"
"""What the model is taught: the conversation as the template writes it."""


def talker_config() -> ModelConfig:
    tiny = TinyModelConfig(characters=CHARACTERS, chat_template=TEMPLATE, max_position_embeddings=256)
    return ModelConfig(tiny=tiny, max_model_len=256, max_prompt_tokens=128, max_response_tokens=128)


def taught(folder: Path) -> TextGenerator:
    """Return the taught model; its folder is made in ``folder``."""
    config = talker_config()
    generator = TextGenerator.build(config, ensure_model_folder(config, folder, 0), num_threads=1)
    model: Any = generator.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.tensor([generator.codec.encode(WHOLE)])
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        for _ in range(STEPS):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return generator


if __name__ == "__main__":  # writes the folder that vllm_answers.json was recorded with
    import sys

    generator = taught(Path(sys.argv[1]))
    generator.model.save_pretrained(sys.argv[1])
