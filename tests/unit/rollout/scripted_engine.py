"""An engine's HTTP face on a real port, with answers that a test decides."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web

from trinity_mq.models import InferenceModel


def completion(text="7", n=1, version=(1, 3)):
    """Return what an engine answers to a chat completion with ``n`` choices of ``text``."""
    ids = [ord(character) for character in text]
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": [*ids, 1],
        "token_logprobs": [-0.5] * (len(ids) + 1),
        "weight_versions": [[0, *version]],
    }
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "prompt_token_ids": [40, 41],
        "prompt_text": "p",
        "choices": [{**choice, "index": index} for index in range(n)],
    }


def refused(status, code, retry_after=None, **extra):
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return web.json_response({"error": {"message": code, "code": code, **extra}}, status=status, headers=headers)


class ScriptedEngine:
    """Answers what ``script`` returns: a body, a response, or None for the usual one."""

    def __init__(self):
        self.requests = []
        self.headers = []
        self.script = None
        self.model = None

    async def chat(self, request):
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        answer = None if self.script is None else self.script(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer is None:
            answer = completion(n=body.get("n", 1))
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@asynccontextmanager
async def scripted_engine(engine_id="engine-0"):
    """Serve a ScriptedEngine on a free port."""
    engine = ScriptedEngine()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine.model = InferenceModel(id=engine_id, url=f"http://127.0.0.1:{port}", name="m")
    try:
        yield engine
    finally:
        await runner.cleanup()
