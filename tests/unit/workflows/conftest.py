import shutil
import sys

import pytest

from trinity_mq.experience import Experience


class StubModel:
    """Answers from a list, and records its calls as the history of a real wrapper would."""

    def __init__(self, answers, *, enable_history=False):
        self.answers = list(answers)
        self.calls = []
        self.enable_history = enable_history
        self._history = []

    def _answer(self, n):
        made = []
        for _ in range(n):
            answer = self.answers.pop(0)
            text, status = answer if isinstance(answer, tuple) else (answer, None)
            tokens = [1, 2, *range(3, 4 + len(text))]
            keys = {"logprobs": [-1.0] * (len(tokens) - 2)} if status == "prompt_truncated" else {}
            made.append(
                Experience(
                    tokens=tokens, prompt_length=2, response_text=text, truncate_status=status, versions=None, **keys
                )
            )
        self._history += made
        return made

    def chat(self, messages, **keys):
        self.calls.append((messages, keys))
        return self._answer(keys.get("n", 1))

    async def chat_async(self, messages, **keys):
        return self.chat(messages, **keys)

    def generate(self, prompts, **keys):
        self.calls.append((prompts, keys))
        return self._answer(keys.get("n", 1))

    async def generate_async(self, prompts, **keys):
        return self.generate(prompts, **keys)

    def extract_experience_from_history(self, clear_history=True):
        taken = list(self._history)
        if clear_history:
            self._history.clear()
        return taken


@pytest.fixture
def plugin_folder(tmp_path):
    """An empty plug-in folder. Afterwards no module of it is found or listed, because its files are deleted."""
    paths = list(sys.path)
    folder = tmp_path / "plugins"
    folder.mkdir()
    yield folder
    for module in folder.glob("*.py"):
        sys.modules.pop(module.stem, None)
    shutil.rmtree(folder)
    sys.path[:] = paths


@pytest.fixture
def stub_model():
    return StubModel
