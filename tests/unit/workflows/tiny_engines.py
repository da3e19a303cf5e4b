"""Real engine servers around real tiny models, and a stand-in for a judge that says what a test wants."""

import string
from contextlib import asynccontextmanager

from aiohttp import web

from tests.unit.models.conftest import VERSION, engine_server
from tests.unit.models.test_other_servers import other_server
from trinity_mq.config import Config, ModelConfig, TinyModelConfig
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models import InferenceModel
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.scheduling import WorkflowRunner

PRINTABLE = "".join(dict.fromkeys(string.printable))
"""A vocabulary that covers English prompts."""


def make_generator(folder, *, characters=PRINTABLE, seed=0, max_model_len=4096, chat_template=None):
    """Return a tiny model of that vocabulary, with weights from the seed. None: the model's chat template."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    tiny = TinyModelConfig(characters=characters, max_position_embeddings=max_model_len, **sizes)
    limits = {"max_prompt_tokens": max_model_len - 16, "max_response_tokens": 16}
    config = ModelConfig(tiny=tiny, max_model_len=max_model_len, **limits)
    path = ensure_model_folder(config, folder, seed)
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return TextGenerator.build(config, path, num_threads=1)


@asynccontextmanager
async def tiny_engine(generator, name="tiny", lease=60.0):
    """Serve ``generator`` on loopback for ``lease`` seconds at most; yields the handle."""
    names = {"engine_id": name, "model_name": name, "model_path": f"/{name}"}
    async with engine_server(generator, **names, token="t", lease=lease) as server:
        yield InferenceModel(name, server.url, name, f"/{name}", VERSION)


@asynccontextmanager
async def running(generator, tmp_path, *, max_prompt_tokens=5000, max_response_tokens=3000, **explorer):
    """Yield a WorkflowRunner whose engine serves ``generator``."""
    rollout = {"enable_history": True, **explorer.pop("rollout_model", {})}
    limits = {"max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
    config = Config.model_validate(
        {
            "run_dir": str(tmp_path),
            "model": {"tiny": {}, "max_model_len": 8192, **limits},
            "explorer": {"max_timeout": 50.0, "max_retry_times": 0, "rollout_model": rollout, **explorer},
        }
    )
    async with tiny_engine(generator) as engine:
        runner = WorkflowRunner(config, engine)
        try:
            yield runner
        finally:
            await runner.close()


class ScriptedJudge:
    """An OpenAI server that answers what ``answers`` gives, one after the other, the last one for ever. It knows no
    token ids. An answer is a text, None for none at all, a function of the messages, bytes: a whole body, or a number:
    an HTTP status.
    """

    def __init__(self, answers):
        self.answers = list(answers)
        self.asked = []
        self.model = None

    def answer(self, body):
        self.asked.append(body["messages"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(body["messages"])
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/json")
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "out of order", "code": "broken"}}, status=answer)
        message = {"role": "assistant", "content": answer}
        choices = [] if answer is None else [{"index": 0, "message": message, "finish_reason": "stop"}]
        common = {"id": "x", "object": "chat.completion", "created": 0, "model": "judge"}
        return web.json_response({**common, "choices": choices})


@asynccontextmanager
async def scripted_judge(*answers):
    """Serve a ScriptedJudge on a free port."""
    judge = ScriptedJudge(answers)
    async with other_server(judge.answer) as (url, _):
        judge.model = InferenceModel(id="j", url=url, name="judge", role="auxiliary")
        yield judge
