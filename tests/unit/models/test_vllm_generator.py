"""Weights into vLLM, by a scripted server that answers when the test says so, and one that never does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.engines.api_errors import ApiError
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.vllm import api
from trinity_mq.engines.vllm.client import VllmClient, VllmSilent
from trinity_mq.engines.vllm.generator import VllmGenerator, model_limits, silence_limit
from trinity_mq.families.forms import AnswerForm
from trinity_mq.models import ensure_model_folder
from trinity_mq.models.errors import ModelError
from trinity_mq.testing.virtual_time import run_virtually

SPEC = {"version": [1, 2], "epoch": 1, "attempt": 1, "seconds": 30.0, "rank": 1}
DEADLINE = 2 * 30.0 + 10.0
TRANSFER = 5.0


class Vllm:
    """Stands for client and server. Its workers receive in :data:`TRANSFER` seconds, and report ``problems``; it never
    answers the paths in ``hangs``.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems, self.hangs = problems, set[str]()
        self.sent: list[str] = []
        self.gave_up = asyncio.Event()

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None, **query: str
    ) -> dict[str, Any]:
        self.sent.append(path)
        try:
            async with asyncio.timeout(timeout):
                if path in self.hangs:
                    await asyncio.Event().wait()
                if path == api.UPDATE and body is not None:
                    await asyncio.sleep(TRANSFER)
                    for worker, problem in enumerate(self.problems):
                        api.report_file(body["update_info"]["report"], worker).write_text(problem)
        except TimeoutError as error:
            raise VllmSilent(500, f"no answer to {path}") from error
        return {}

    def generator(self, home: Path, codec: Any = None) -> VllmGenerator:
        client: Any = self
        workers = len(self.problems)
        options = {"vocabulary": 9, "max_model_len": 9, "pause_mode": "wait", "home": home, "workers": workers}
        return VllmGenerator(codec, client, give_up=self.gave_up.set, **options)  # type: ignore[arg-type]


def play(act: Callable[[], Awaitable[None]]) -> None:
    run_virtually(act(), limit=1000)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_form_that_the_vocabulary_cannot_write_is_refused(tmp_path: Path) -> None:
    def generator(characters: str) -> VllmGenerator:
        folder = tmp_path / characters[:1]
        ensure_model_folder(ModelConfig(tiny=TinyModelConfig(characters=characters)), folder, 0)
        return Vllm([]).generator(tmp_path, TextCodec.load(folder))

    digits = generator("0123456789")
    answer = AnswerForm("response_format", {"type": "object"})
    call = AnswerForm("tool_choice", tools=[{"type": "function", "function": {"name": "add"}}], must_call=True)
    for form in (answer, call):
        with pytest.raises(ApiError, match=f"{form.option} demands a JSON object, which .* cannot write") as refused:
            digits.grammar_of(form, "")
        assert (refused.value.status, refused.value.code) == (400, "unsupported_option")
    assert digits.grammar_of(AnswerForm("response_format", {"type": "integer"}), "")
    assert generator('{}":,0').grammar_of(answer, "")


@pytest.mark.parametrize("path", [api.START_UPDATE, api.UPDATE])
def test_vllm_that_does_not_answer_in_time_is_ended(path: str, tmp_path: Path) -> None:
    async def act() -> None:
        vllm = Vllm(["", ""])
        vllm.hangs.add(path)
        began = now()
        with pytest.raises(VllmSilent):
            await vllm.generator(tmp_path).receive(SPEC)
        assert now() - began == pytest.approx(DEADLINE)
        assert vllm.gave_up.is_set()

    play(act)


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ({"method": "memory", "seconds": 7200.0}, 7200.0 + 60.0 + 10.0),
        ({"method": "collective", "seconds": 7200.0, "step_seconds": 300.0}, 7200.0 + 660.0 + 10.0),
        ({"method": "collective", "seconds": 300.0}, 2 * 300.0 + 10.0),
    ],
    ids=["memory", "broadcast", "broadcast_of_an_earlier_release"],
)
def test_vllm_has_little_more_time_than_its_workers(spec: dict[str, Any], limit: float) -> None:
    assert silence_limit(spec) == limit


def test_loading_has_as_much_time_as_the_transfer(tmp_path: Path) -> None:
    async def act() -> None:
        vllm = Vllm([""])
        generator = vllm.generator(tmp_path)
        spec = {**SPEC, "seconds": 400.0}
        await generator.receive(spec)
        vllm.hangs.add(api.FINISH_UPDATE)
        began = now()
        with pytest.raises(VllmSilent):
            await generator.apply(spec)
        assert now() - began == pytest.approx(400.0)

    play(act)


def test_a_worker_that_hangs_is_noticed_after_the_attempt_was_aborted(tmp_path: Path) -> None:
    async def act() -> None:
        vllm = Vllm([""])
        vllm.hangs.add(api.UPDATE)
        began = now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await vllm.generator(tmp_path).receive(SPEC)
        await vllm.gave_up.wait()
        assert now() - began == pytest.approx(DEADLINE)

    play(act)


def test_an_attempt_waits_for_the_transfer_of_an_aborted_one_and_opens_no_second_update(tmp_path: Path) -> None:
    async def act() -> None:
        vllm = Vllm([""])
        generator = vllm.generator(tmp_path)
        began = now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await generator.receive(SPEC)
        await generator.receive(SPEC)
        assert now() - began == pytest.approx(2 * TRANSFER)
        assert vllm.sent == [api.START_UPDATE, api.UPDATE, api.UPDATE]
        await generator.apply(SPEC)
        await generator.receive(SPEC)
        assert vllm.sent[3:] == [api.PAUSE, api.FINISH_UPDATE, api.RESUME, api.START_UPDATE, api.UPDATE]
        assert not vllm.gave_up.is_set()

    play(act)


def test_weights_that_do_not_reach_one_worker_are_not_applied_and_may_be_sent_again(tmp_path: Path) -> None:
    async def act() -> None:
        vllm = Vllm(["", "ChannelError: a checksum differs"])
        generator = vllm.generator(tmp_path)
        with pytest.raises(ApiError, match="a checksum differs"):
            await generator.receive(SPEC)
        vllm.problems = ["", ""]
        assert await generator.receive(SPEC) == SPEC
        assert vllm.sent == [api.START_UPDATE, api.UPDATE, api.UPDATE]
        assert not vllm.gave_up.is_set()

    play(act)


def test_heads_that_the_devices_cannot_divide_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(tiny=TinyModelConfig(num_attention_heads=6))
    folder = ensure_model_folder(config, tmp_path / "model", 0)
    assert model_limits(config, folder, 3) == model_limits(config, folder)
    with pytest.raises(ModelError, match=r"size is 4, and the model in .* has 6 attention heads"):
        model_limits(config, folder, 4)


async def test_a_server_that_never_answers_is_silent_and_one_that_ends_is_gone(tmp_path: Path) -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    application, socket = web.Application(), tmp_path / "http.sock"
    application.add_routes([web.post(api.UPDATE, never)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    async with VllmClient(socket) as client:
        with pytest.raises(VllmSilent, match=f"{api.UPDATE} within 0.05 s"):
            await client.post(api.UPDATE, timeout=0.05)
        await runner.cleanup()
        with pytest.raises(ApiError, match="shutting down") as gone:
            await client.post(api.UPDATE, timeout=5.0)
    assert not isinstance(gone.value, VllmSilent)
