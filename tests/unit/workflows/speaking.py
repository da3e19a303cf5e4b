"""A real tiny model behind a real engine server that says what a test wants, with the logprobs of its weights."""

from __future__ import annotations

from tests.unit.workflows.running import running
from tests.unit.workflows.tiny_engines import make_generator
from trinity_mq.engines.generation.request import Completion, ScoreRequest

__all__ = ["Speaking", "chatting_generator", "running"]

TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(' ') + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class Speaking:
    """A generator that "samples" the next of ``says``."""

    def __init__(self, generator, says=()):
        self.generator, self.says = generator, list(says)
        self.asked = []
        """The prompts, as text, one for each completion."""

    def __getattr__(self, name):
        return getattr(self.generator, name)

    def generate(self, requests, watch=None):
        return [[self._say(request) for _ in range(request.n)] for request in requests]

    def _say(self, request):
        codec = self.generator.codec
        self.asked.append(codec.decode([list(request.prompt)])[0])
        text = self.says.pop(0)
        ids = [*codec.encode(text), min(codec.stop_ids)]
        scored = self.generator.score([ScoreRequest([*request.prompt, *ids], request.temperature or 1.0)])[0]
        return Completion(ids, scored[len(request.prompt) - 1 :], text, "stop")


def chatting_generator(folder):
    """Return a tiny model with a chat template that knows tools."""
    return make_generator(folder, chat_template=TEMPLATE)
