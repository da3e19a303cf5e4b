"""HTTP routes of the gateway: sessions, and the model APIs that agents call within them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web
from pydantic import ValidationError

from trinity_mq.families.switches import merge_switch_fields, without_switches
from trinity_mq.gateway import access
from trinity_mq.gateway.bodies import EndBody, FeedbackBody, OpenBody, RewardBody, shown
from trinity_mq.gateway.conversations import Conversation, Conversations, Try, digest_of
from trinity_mq.gateway.engines import EngineCalls
from trinity_mq.gateway.lineages import Chain, Match, read_chain
from trinity_mq.gateway.protocols.anthropic import AnthropicProtocol
from trinity_mq.gateway.protocols.base import BadRequest, EngineRequest, Protocol, as_json
from trinity_mq.gateway.protocols.openai import CHAT, COMPLETIONS, OpenAIProtocol
from trinity_mq.gateway.protocols.responses import ResponsesProtocol
from trinity_mq.gateway.recorded_call import prompt_text_of, recorded_call
from trinity_mq.gateway.rules import is_recorded, recorded_share
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import EventTooLarge, OutsideEvent, SessionStore, SessionsUnavailable
from trinity_mq.gateway.settings import AppSettings
from trinity_mq.messages import ContentError, SessionCall, SessionEnd, SessionOpened, SessionReward, SessionsCommitted
from trinity_mq.messages.sessions import SCOPES, KeyScope, StoredResponse
from trinity_mq.models.clients import VERSION_HEADER
from trinity_mq.models.errors import EngineError, EngineLost, EngineNotReady, EngineRefused
from trinity_mq.models.recording.calls import LOGPROBS_HEADERS
from trinity_mq.runtime.http import (
    JSON,
    LARGE_BODY,
    BodyReader,
    ReaderBusy,
    json_object,
    new_application,
    read_body,
    read_json,
    refuse_forged,
    route,
)
from trinity_mq.telemetry.trace_ids import TRACEPARENT, read_traceparent

log = structlog.get_logger(__name__)

PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": OpenAIProtocol(CHAT),
    "/v1/completions": OpenAIProtocol(COMPLETIONS),
    "/v1/responses": ResponsesProtocol(),
    "/v1/messages": AnthropicProtocol(),
}
"""Protocol by route. The route may follow the path of a session."""
RECORDED_HEADER, SESSION_HEADER = "X-TMQ-Recorded", access.SESSION_HEADER
RETRIED_HEADER = "x-stainless-retry-count"
"""Header that the SDKs of OpenAI and Anthropic send with the number of earlier attempts of the same request."""
MOST_RETRIES = 1000
IGNORED_IN_TRAINING = ("top_p", "seed", "logit_bias", "min_tokens", "ignore_eos")
"""Sampling options of a client that have no effect in sessions recorded for training if ``gateway.sampling`` is
``configured``.
"""
SHUTDOWN_SECONDS = 10.0
"""Seconds that running calls get to finish when the gateway stops."""
MAX_REPORTS = 10_000
"""Maximum number of reward and end events of a session. Calls count separately."""
LONGEST_LIMIT = 9
"""Maximum digits of the ``limit`` parameter of a session list."""
LONGEST_KEY = 100
"""Maximum bytes of a reward key, or of the run id of a feedback, that stands verbatim in the id of an event."""
KEPT_IN_ANSWERS = ("content", "tool_calls", "reasoning_content")
"""Keys of an answer's message that are stored for ``previous_response_id``."""
GONE = 410
"""HTTP status of a call in a session that has ended."""


class Refused(Exception):
    """Error response to a request."""

    def __init__(
        self, status: int, message: str, kind: str, *, retry_after: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.param = status, kind, retry_after, param


OF_REQUEST = (Refused, BadRequest, EventTooLarge, ContentError)
"""Errors that the request itself caused."""


class GatewayApp:
    """HTTP application of the gateway: all routes, on top of one session store.

    Args:
        settings: Settings of the routes.
        store: Storage of the sessions.
        engines: Engines that answer calls.
        access_rules: Decides the permissions of keys.
        url: Returns the base URL for the URLs of sessions.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        settings: AppSettings,
        store: SessionStore,
        engines: EngineCalls,
        access_rules: access.Access,
        url: Callable[[], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.store = settings, store
        self._engines, self._access, self._url, self.clock = engines, access_rules, url, clock
        self._conversations = Conversations()
        self._draw = random.Random()
        self._reader = BodyReader(LARGE_BODY)
        self.counts: Counter[str] = Counter()
        """Numbers of ``calls``, ``unrecorded`` calls, ``lineages``, ``ties`` and ``malformed_calls``, and of prefix
        breaks by cause."""
        self.asking = 0
        """Number of calls whose request to an engine is in progress."""

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        settings = self.settings.gateway
        application = new_application([self._errors], max_body=settings.max_body_bytes)
        application.add_routes(
            [
                route("POST", "/sessions", self.open),
                route("GET", "/sessions", self.list),
                route("GET", "/s/{session}", self.show),
                route("DELETE", "/s/{session}", self.discard),
                route("POST", "/s/{session}/reward", self.reward),
                route("POST", "/s/{session}/end", self.end),
                route("POST", "/feedback", self.feedback),
                route("POST", "/commit", self.commit),
                route("GET", "/health", self.health),
            ]
        )
        for prefix in ("", "/s/{session}"):
            application.add_routes([route("POST", prefix + path, self.call) for path in PROTOCOLS])
            application.add_routes([route("GET", f"{prefix}/v1/models", self.models)])
        return application

    # -- sessions

    async def open(self, request: web.Request) -> web.Response:
        """Create a session."""
        self._admin(request)
        body = await _parsed(request, OpenBody)
        if body.record == "train" and self.settings.compares_runs and not body.group:
            advice = (
                "give a group, the same for sessions of the same task; or end the session with a replay, which is a "
                "group of its own, and open it with record: eval"
            )
            raise self._group_wanted(advice, "group")
        opened, key = self._opened(body)
        await self.store.open(opened)
        answer = {
            "id": opened.session,
            "base_url": f"{self._url()}/s/{opened.session}/v1",
            "url": f"{self._url()}/s/{opened.session}",
            "key": key,
            "expires": opened.opened + opened.idle_ttl,
            "recorded": opened.record != "off",
        }
        return web.json_response(answer, status=201)

    def _group_wanted(self, advice: str, param: str) -> Refused:
        """Return the error response to a request that lacks the group of a session."""
        algorithm = self.settings.algorithm_type
        message = f"algorithm_type {algorithm} compares sessions of a group with each other: {advice}"
        return Refused(422, message, "group_wanted", param=param)

    def _opened(self, body: OpenBody) -> tuple[SessionOpened, str]:
        settings, ledger = self.settings.gateway, self.store.ledger
        if (count := ledger.open) >= settings.max_open:
            raise Refused(
                429, f"{count} sessions are open (gateway.max_open); end some", "too_many_sessions", retry_after=10
            )
        record, sampled_out = body.record, False
        if record == "train":
            share = recorded_share(ledger.waiting, ledger.kept_bytes, settings)
            if not is_recorded(share, self._draw):
                if settings.when_behind == "refuse":
                    raise Refused(
                        429, f"{ledger.waiting} sessions wait to be trained on", "training_is_behind", retry_after=10
                    )
                record, sampled_out = "off", True
        key = access.new_key()
        size = body.group_size or self.settings.group_size
        opened = SessionOpened(
            session=access.new_session_id(),
            opened=self.clock(),
            key_hash=access.hash_of(key),
            scopes=list(SCOPES) if body.scopes is None else [scope for scope in body.scopes if scope != "replay"],
            may_replay="replay" in (body.scopes or ()),
            record=record,
            sampled_out=sampled_out,
            task=body.task,
            group=body.group,
            group_size=size,
            labels=body.labels,
            idle_ttl=body.idle_ttl or settings.idle_ttl,
            reward_ttl=body.ttl or settings.reward_ttl,
        )
        return opened, key

    async def list(self, request: web.Request) -> web.Response:
        """Return the number of sessions by state, the ledger's totals, and the first sessions that match all labels,
        the group and the state in the query. Without any of these, no session is listed.
        """
        self._admin(request)
        states = Counter(session.state for session in self.store.ledger)
        filters = dict(request.query)
        limit_text = filters.pop("limit", "100")
        limit = int(limit_text) if limit_text.isdecimal() and len(limit_text) <= LONGEST_LIMIT else 100
        descriptions: list[dict[str, Any]] = []
        for session in self.store.ledger if filters else ():
            labels = session.opened.labels if session.opened else {}
            if len(descriptions) < limit and all(
                (session.state if name == "state" else session.group if name == "group" else labels.get(name)) == value
                for name, value in filters.items()
            ):
                descriptions.append(shown(session))
        return web.json_response({"states": dict(states), "counts": self.store.ledger.counts, "sessions": descriptions})

    async def show(self, request: web.Request) -> web.Response:
        """Return the current state of a session."""
        return web.json_response(shown(await self._session(request, "show")))

    async def reward(self, request: web.Request) -> web.Response:
        """Reward a session, one of its lineages, or one of its calls."""
        session = await self._session(request, "reward")
        body = await _parsed(request, RewardBody)
        self._check_scopes(request, session, access.further_scopes("reward", body))
        if body.lineage is not None and (body.call is not None or body.choice is not None):
            raise BadRequest("the reward names a lineage and a call or a choice, wanted one of them", "lineage")
        event = SessionReward(session=session.id, **body.model_dump(exclude={"key"}))
        if body.lineage is not None:  # a gateway of release 0.2.0 then rewards this call, and not the whole session
            event = event.model_copy(update={"call": body.lineage})
        key = _part_of_id(body.key) or uuid.uuid4().hex
        return await self._report(request, session, event, f"reward-{session.id}-{key}")

    async def end(self, request: web.Request) -> web.Response:
        """End a session, possibly with a reward, metrics or a replay."""
        session = await self._session(request, "end")
        body = await _parsed(request, EndBody)
        self._check_scopes(request, session, access.further_scopes("end", body))
        if body.replay is not None and (reason := self.settings.replay_refusal(body.replay)) is not None:
            raise Refused(403, reason, "not_allowed", param="replay")
        event = SessionEnd(session=session.id, **body.model_dump(exclude={"replay"}), replay=body.replay)
        self._conversations.forget(session.id)
        # the same end sent twice gets the same message id and counts once
        digest = hashlib.sha256(body.model_dump_json().encode()).hexdigest()[:16]
        return await self._report(request, session, event, f"end-{session.id}-{digest}")

    async def discard(self, request: web.Request) -> web.Response:
        """End a session with outcome ``discard``. It is not trained on, unless its training was decided before."""
        session = await self._session(request, "discard")
        event = SessionEnd(session=session.id, outcome="discard", reason="deleted")
        return await self._report(request, session, event, f"end-{session.id}-discard")

    async def _report(
        self, request: web.Request, session: Session, event: OutsideEvent, message_id: str
    ) -> web.Response:
        """Store an event of a session, and return the response with its effect."""
        if len(session.events) >= self.settings.gateway.max_calls + MAX_REPORTS:
            raise Refused(429, f"session {session.id} has {len(session.events)} events", "too_many_events")
        applied = await self.store.report(event, message_id)
        current = self.store.ledger.get(session.id) or session
        answer = {"accepted": applied.taken != "refused", "repeated": applied.taken == "repeated", "id": current.id}
        if self._access.allows(current, access.key_from_headers(request.headers), "read"):
            answer |= shown(current)
        if applied.taken == "refused":
            return web.json_response({**answer, "error": _error(applied.reason, "too_late")}, status=409)
        return web.json_response(answer)

    async def feedback(self, request: web.Request) -> web.Response:
        """Reward answers of calls outside of sessions by their answer ids. Each such answer is a session of its own,
        which the reward ends.
        """
        self._admin(request)
        body = await _parsed(request, FeedbackBody)
        unknown: list[str] = []
        refused: dict[str, str] = {}
        group = ""
        if self.settings.compares_runs and not (group := str(body.task_id)):
            raise self._group_wanted("give a task_id, the same for answers to the same task", "task_id")
        for name in body.msg_ids:
            # only the first unknown id is waited for: another gateway may have recorded it a moment ago
            session = self.store.ledger.get(name) or (None if unknown else await self.store.find(name))
            if session is None:
                unknown.append(name)
                continue
            event = SessionReward(session=name, reward=body.reward, final=True, group=group)
            applied = await self.store.report(event, f"feedback-{name}-{_part_of_id(str(body.run_id))}")
            if applied.taken == "refused":
                refused[name] = applied.reason
        status = 404 if unknown else 409 if refused else 200
        answer = {"status": "success" if status == 200 else "incomplete", "unknown": unknown, "refused": refused}
        if status != 200:
            answer["error"] = _error(f"{len(unknown)} answers are not known, {len(refused)} came too late", "feedback")
        return web.json_response(answer, status=status)

    async def commit(self, request: web.Request) -> web.Response:
        """Release ended and rewarded sessions for training: their groups stop waiting for further members."""
        self._admin(request)
        await self.store.report(SessionsCommitted(), f"commit-{uuid.uuid4().hex}")
        parked = sum(session.state == "parked" for session in self.store.ledger.live.values())
        return web.json_response({"status": "success", "waiting": self.store.ledger.waiting, "parked": parked})

    async def health(self, request: web.Request) -> web.Response:
        """Return whether the gateway has read its sessions, so that it can answer calls."""
        ready = self.store.is_ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    # -- models

    async def models(self, request: web.Request) -> web.Response:
        """Return the list of models, which holds a single model."""
        if "session" in request.match_info:
            await self._session(request, "models")
        name = self.settings.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "trinity-mq", "display_name": name}
        return web.json_response({"object": "list", "data": [{**model, "type": "model"}], "has_more": False})

    async def call(self, request: web.Request) -> web.StreamResponse:
        """Answer a request to the model, and record the answer if the session is recorded."""
        path = f"/v1/{request.path.rpartition('/v1/')[2]}"  # a session id may contain any characters
        protocol = PROTOCOLS[path]
        asking = await self._session_of_call(request)
        body, engine_request, digest = await self._read_call(request, protocol, path)
        call = protocol.new_id()
        session = asking or await self._session_of_one_call(call)
        conversation = self._conversations.of(session)
        trying = conversation.trying(call, digest, retry=_retry_of(request), began=self.clock())
        with trying as current:
            self._check_limits(session, conversation)
            engine_request = await self._with_earlier(session, conversation, engine_request)
            sampled_request = self._sampled_as_configured(session, engine_request)
            recording = _Recording(self, session, conversation, request, sampled_request, current, path)
            await recording.continue_conversation()
            self.asking += 1
            try:
                if engine_request.streams:
                    return await self._stream(request, protocol, body, sampled_request, recording)
                texts = {} if sampled_request.logprobs else LOGPROBS_HEADERS
                answer, engine = await self._engines.ask(
                    sampled_request.path, sampled_request.body, conversation.engine, {**recording.trace, **texts}
                )
                conversation.engine = engine.id
                recorded = await recording.keep(answer)
                headers = {RECORDED_HEADER: recorded, SESSION_HEADER: session.id, **_version_of(answer)}
                return web.json_response(protocol.answer(answer, call, body), headers=headers, dumps=as_json)
            finally:
                self.asking -= 1

    async def _read_call(
        self, request: web.Request, protocol: Protocol, path: str
    ) -> tuple[dict[str, Any], EngineRequest, str]:
        """Return the body of a request to the model, the request for the engine, and the digest of the body."""
        raw = await read_body(request)

        def read() -> tuple[dict[str, Any], EngineRequest, str]:
            body = json_object(raw)
            return body, replace(protocol.request(body), size=len(raw)), digest_of(path, body)

        return await self._reader.run(len(raw), read)

    async def _with_earlier(
        self, session: Session, conversation: Conversation, request: EngineRequest
    ) -> EngineRequest:
        """Return the request with the conversation of the response that it continues. The response is looked up in this
        session only; the id of a response of another session counts as unknown.
        """
        name = request.previous
        if not name:
            return request
        if conversation.responses.of(name, session.calls) is None:
            # another gateway may have answered a moment ago; the ledger has a new session object if it was read again
            await self.store.find_call(session.id, name)
            session = self.store.ledger.get(session.id) or session
        earlier = conversation.responses.messages(name, session.calls)
        if earlier is None:
            raise Refused(
                400,
                f"Previous response with id {name!r:.100} not found: wanted a response of this session that was made "
                "with store true, while the stored responses took at most gateway.max_body_bytes; or send the whole "
                "conversation in input",
                "previous_response_not_found",
                param="previous_response_id",
            )
        messages, head = request.body["messages"], request.unstored
        body = {**request.body, "messages": [*messages[:head], *earlier, *messages[head:]]}
        size = request.size + conversation.responses.bytes
        return replace(request, body=body, unstored=head + len(earlier), size=size)

    async def chain_of(self, request: EngineRequest) -> Chain | None:
        """Return the digests of a chat, None if the request has no readable messages. Large requests are read in a
        thread, because this takes time.
        """
        return await self._reader.run(request.size, lambda: read_chain(request.body))

    async def _stream(
        self,
        request: web.Request,
        protocol: Protocol,
        body: Mapping[str, Any],
        engine_request: EngineRequest,
        recording: _Recording,
    ) -> web.StreamResponse:
        """Stream an answer to the client. The closing events are sent after the answer is recorded."""
        events = protocol.events(recording.call, body)
        engine = recording.conversation.engine
        async with self._engines.stream(engine_request.path, engine_request.body, engine, recording.trace) as stream:
            recording.conversation.engine = stream.model.id
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream",
                    "Cache-Control": "no-cache",
                    SESSION_HEADER: recording.session.id,
                }
            )
            await response.prepare(request)
            try:
                if opening := events.opening():
                    await response.write(b"".join(opening))
                async for chunk in stream.chunks():
                    if event_bytes := events.of(chunk):
                        await response.write(b"".join(event_bytes))
                answer = stream.answer()
                if not answer["choices"]:
                    raise EngineLost("the engine's stream ended without a token", stream.model)
                await recording.keep(answer)
                await response.write(b"".join(events.closing(answer)))
            except EngineError as error:
                log.warning("stream_broke_off", session=recording.session.id, reason=str(error))
                await response.write(b"".join(events.failed(public_words(error), "engine_error")))
        await response.write_eof()
        return response

    def _sampled_as_configured(self, session: Session, request: EngineRequest) -> EngineRequest:
        """Return the request for the engine: without the model name, with token ids and logprobs, and with a token
        limit if the client sets none.

        If the session is recorded for training and ``gateway.sampling`` is ``configured``, the client's options in
        :data:`IGNORED_IN_TRAINING` are removed, and the configured sampling parameters replace the client's. The
        client's switches of the chat template override the configured switches, unless ``gateway.switches`` is
        ``configured``.
        """
        body = dict(request.body)
        body.pop("model", None)
        if request.path == CHAT:
            asked = body if self.settings.gateway.switches == "agent" else {}
            body = without_switches(body) | merge_switch_fields(self.settings.sampling, asked)
        opened = session.opened
        trains = opened is not None and opened.record == "train"
        if trains and self.settings.gateway.sampling == "configured":
            for name in IGNORED_IN_TRAINING:
                body.pop(name, None)
            body |= without_switches(self.settings.sampling)
        body["return_token_ids"] = True
        if request.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.path == CHAT:
            body["return_prompt_text"] = True
            body["logprobs"] = True
        elif body.get("logprobs") is None:
            body["logprobs"] = 0
        has_limit = body.get("max_completion_tokens") is not None or body.get("max_tokens") is not None
        if not has_limit and self.settings.max_response_tokens is not None:
            body["max_tokens"] = self.settings.max_response_tokens
        return replace(request, body=body)

    def _check_limits(self, session: Session, conversation: Conversation) -> None:
        settings = self.settings.gateway
        if session.end is not None or session.is_settled:
            raise Refused(GONE, f"session {session.id} has ended; POST /sessions opens a new session", "session_ended")
        if conversation.calls >= settings.max_calls:
            raise Refused(
                403, f"session {session.id} has made {conversation.calls} calls (gateway.max_calls)", "too_many_calls"
            )
        if (tokens := conversation.lineages.tokens) >= settings.max_session_tokens:
            raise Refused(
                403, f"session {session.id} has {tokens} tokens (gateway.max_session_tokens)", "too_many_tokens"
            )
        now = asyncio.get_running_loop().time()
        if (wait := conversation.seconds_until_allowed(now, settings.calls_per_minute)) > 0:
            raise Refused(
                429,
                f"session {session.id} made {settings.calls_per_minute} calls within a minute "
                "(gateway.calls_per_minute)",
                "rate_limit_exceeded",
                retry_after=wait,
            )
        conversation.times.append(now)
        conversation.calls += 1

    async def keep(self, call: SessionCall) -> bool:
        """Record an answer and return whether it is certainly stored."""
        stored = await self.store.record(call)
        self.count_call(is_kept=stored)
        self.counts["ties"] += call.tied
        self.counts["malformed_calls"] += sum(choice.malformed_calls for choice in call.choices)
        if call.break_cause:
            self.counts[f"breaks_{call.break_cause}"] += 1
        return stored

    def add(self, call: SessionCall, conversation: Conversation, prompt_text: str) -> None:
        """Add a stored answer to its session's lineages, so that later calls can continue it."""
        conversation.lineages.add(call, prompt_text)
        self.counts["lineages"] += conversation.lineages.begins_lineage(call.call)
        self._conversations.weigh(conversation)

    def count_call(self, *, is_kept: bool) -> None:
        """Count an answer of a recorded session."""
        self.counts["calls"] += 1
        self.counts["unrecorded"] += not is_kept

    # -- identity of the caller

    async def _session_of_call(self, request: web.Request) -> Session | None:
        """Return the session of a request to the model, found by path, then by header, then by key. None: the request
        has full access and names no session, so the call becomes its own session.
        """
        key = access.key_from_headers(request.headers)
        name = request.match_info.get("session") or request.headers.get(SESSION_HEADER)
        if name:
            return await self._session(request, "call", name)
        if key.startswith(access.KEY_BEGINS):
            session = await self.store.find_key(access.hash_of(key))
            if session is None:
                reason = f"the session of this key is over, or not known here; {self._advice}"
                raise Refused(401, reason, "invalid_api_key")
            self._check_scopes(request, session, [access.ROUTE_SCOPES["call"]])
            return session
        self._admin(request)
        return None

    async def _session_of_one_call(self, call: str) -> Session:
        """Create a session for a single call."""
        opened, _ = self._opened(OpenBody())  # its group comes with the feedback
        opened = opened.model_copy(update={"session": call, "key_hash": "", "ended": True})
        with contextlib.suppress(SessionsUnavailable, TimeoutError):
            async with asyncio.timeout(self.settings.gateway.record_timeout):
                await self.store.open(opened, at_once=True)
        # answers do not wait for a broker that is unreachable: a session that could not be stored has no opened event
        return self.store.ledger.get(call) or Session(call, opened if opened.record == "off" else None)

    async def _session(self, request: web.Request, route: str, name: str | None = None) -> Session:
        """Return the session of a request after checking that the key has the scope of the route."""
        name = name or request.match_info["session"]
        key = access.key_from_headers(request.headers)
        session = self.store.ledger.get(name)
        if session is None or not self._access.is_key_of(session, key):
            session = await (self._any_session(name) if self._access.is_admin(key) else self._own_session(name, key))
        self._check_scopes(request, session, [access.ROUTE_SCOPES[route]])
        return session

    async def _any_session(self, name: str) -> Session:
        session = await self.store.find(name)
        if session is None:
            raise Refused(
                404, f"no session {name!r} is known here; POST /sessions opens a session", "session_not_found"
            )
        return session

    async def _own_session(self, name: str, key: str) -> Session:
        """Return a session by its key. An unknown key may belong to a session that another gateway created a moment
        ago, so the lookup waits for it. The wait does not depend on whether the id is known: a client that guesses ids
        learns nothing from the response time.
        """
        session = await self.store.find_key(access.hash_of(key)) if key.startswith(access.KEY_BEGINS) else None
        if session is None or session.id != name:
            if self._access.is_keyless:
                # a mistyped id gets its own error: without a key file, ids are not secret
                await self._any_session(name)
            raise Refused(401, f"the key is not the key of this session; {self._advice}", "invalid_api_key")
        return session

    def _check_scopes(self, request: web.Request, session: Session, scopes: Sequence[KeyScope]) -> None:
        key = access.key_from_headers(request.headers)
        lacking = [scope for scope in scopes if not self._access.allows(session, key, scope)]
        if lacking:
            raise Refused(403, f"the key of session {session.id} lacks the scope {lacking[0]!r}", "scope_missing")

    def _admin(self, request: web.Request) -> None:
        if not self._access.is_admin(access.key_from_headers(request.headers)):
            raise Refused(401, f"the key is not known here; {self._advice}", "invalid_api_key")

    @property
    def _advice(self) -> str:
        """Advice for a client whose key was refused."""
        if self._access.is_keyless:
            return (
                "send the key that POST /sessions returned, or no key: this gateway has no gateway.key_file "
                "(a client that insists on a key may send 'none')"
            )
        return (
            "wanted as 'Authorization: Bearer <key>': a key of gateway.key_file, or, for requests of a session, "
            "the key that POST /sessions returned"
        )

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer expected errors in the error format of the requested API; other routes use the format of chat
        completions. Without a key file, refuse requests that may be cross-site requests of a browser. Until the
        sessions have been read, refuse all requests except ``/health``.
        """
        place = request.path.find("/v1/")
        protocol = PROTOCOLS.get(request.path[place:] if place >= 0 else "", PROTOCOLS[CHAT])
        try:
            if self._access.is_keyless:
                refuse_forged(request, self.settings.gateway.host_names, (JSON,))
            if not self.store.is_ready() and request.path != "/health":
                raise Refused(503, "the gateway is still reading its sessions; retry soon", "not_ready", retry_after=1)
            return await handler(request)
        except (*OF_REQUEST, SessionsUnavailable, ReaderBusy, EngineError, web.HTTPException) as error:
            if isinstance(error, EngineError):
                log.warning("call_failed", path=request.path, reason=str(error))
            refused = _refused_by(error, request)
            field_names = protocol.field_names if isinstance(error, EngineRefused) else {}
        headers = {} if refused.retry_after is None else {"Retry-After": f"{max(1, round(refused.retry_after))}"}
        message, param = str(refused), refused.param
        if param is not None and (name := field_names.get(param)):
            message, param = message.replace(param, name), name
        body = protocol.error(message, refused.kind, param)
        response = web.json_response(body, status=refused.status, headers=headers)
        if not request.content.is_eof():
            response.force_close()
        return response


def _refused_by(error: Exception, request: web.Request) -> Refused:
    """Return the response to a request that failed with ``error``."""
    match error:
        case Refused():
            return error
        case BadRequest() | ContentError():
            param = error.param if isinstance(error, BadRequest) else error.where or None
            return Refused(400, str(error), "invalid_request_error", param=param)
        case SessionsUnavailable() | ReaderBusy():
            kind = "not_kept" if isinstance(error, SessionsUnavailable) else "busy"
            return Refused(503, str(error), kind, retry_after=1)
        case EventTooLarge():
            return Refused(413, str(error), "too_large")
        case EngineNotReady():
            return Refused(503, public_words(error), "engine_not_ready", retry_after=error.retry_after)
        case EngineRefused():
            status = error.status if error.status >= 400 else 502
            return Refused(status, public_words(error), error.code or "engine_refused", param=error.param)
        case web.HTTPException():
            return Refused(error.status, f"{request.method} {request.path}: {error.reason}", "http_error")
        case _:
            return Refused(502, public_words(error), "engine_lost", retry_after=1)


def public_words(error: Exception) -> str:
    """Return the description of an engine error for agents. It never contains the address of the engine."""
    match error:
        case EngineError() if error.said:
            return error.said
        case EngineNotReady():
            return "no engine is ready to answer now; retry"
        case EngineRefused():
            return "the engine failed on this request; its log, and that of the gateway, say why"
        case _:
            return "the engine of this request is lost; retry"


class _Recording:
    """Records the answer to a single call."""

    def __init__(
        self,
        app: GatewayApp,
        session: Session,
        conversation: Conversation,
        request: web.Request,
        engine_request: EngineRequest,
        current: Try,
        path: str,
    ) -> None:
        self.session, self.conversation, self.call = session, conversation, current.call
        self._app, self._asked, self._path, self._try = app, engine_request, path, current
        self._chain: Chain | None = None
        self._match: Match | None = None
        outside = request.headers.get(TRACEPARENT, "")
        self.trace = {TRACEPARENT: outside} if read_traceparent(outside) else {}
        """Trace header for the engine, which continues the caller's trace with it. Empty: the caller sent no trace."""

    async def keep(self, answer: Mapping[str, Any]) -> str:
        """Record an answer. Return ``yes``, ``no`` if the answer or the opened event of its session is not certainly
        stored, or ``off`` if the session is not recorded.

        Raises:
            EngineRefused: The answer has no choices, or cannot be recorded; see :func:`recorded_call`.
        """
        if not answer.get("choices"):
            raise EngineRefused("the engine's answer has no choices: it is not a completion", 200, "no_choices")
        opened, stored = self.session.opened, self._store(answer)
        if opened is None:
            self._app.count_call(is_kept=False)
            return "no"
        if opened.record == "off":
            return "off"
        event = recorded_call(
            answer,
            self._asked.body,
            self.conversation.lineages,
            self._chain,
            self._match,
            session=self.session.id,
            call=self.call,
            at=self._app.clock(),
            path=self._path,
            temperature=_temperature(self._asked.body),
            digest=self._try.digest,
            traceparent=self.trace.get(TRACEPARENT, ""),
        )
        session = self._app.store.ledger.get(self.session.id) or self.session
        repeated = self.conversation.repeated_by(self._try, session.calls.values())
        self._try.is_recorded = True  # the store gets it now, whether or not the client still waits
        attempt_fields = {
            "retry": self._try.unknown_tries,
            "began": self._try.began,
            "siblings": sorted(self._try.siblings),
        }
        event = event.model_copy(update={"supersedes": repeated, "stored": stored, **attempt_fields})
        if not await self._app.keep(event):
            return "no"
        # later calls must not continue a call that was not stored
        self._app.add(event, self.conversation, prompt_text_of(answer))
        return "yes"

    async def continue_conversation(self) -> None:
        """Find the recorded answer that the request continues, and give the engine its tokens if ``gateway.merge`` is
        ``renderer``.
        """
        opened = self.session.opened
        if opened is None or opened.record == "off" or opened.ended:
            return  # no other call of the session is recorded
        self._chain = await self._app.chain_of(self._asked)
        if self._chain is None:
            return
        self._match = self.conversation.lineages.match(self._chain, _temperature(self._asked.body))
        if self._match is not None and self._app.settings.gateway.merge == "renderer":
            self._asked.body["continue_tokens"] = self._match.tokens
            self._asked.body["continue_messages"] = self._match.messages

    def _store(self, answer: Mapping[str, Any]) -> StoredResponse | None:
        """Store the answer for requests that refer to it by its id. Return None if it is not stored."""
        asked, opened, message = self._asked, self.session.opened, answer["choices"][0].get("message")
        if not asked.stores or opened is None or opened.ended or not isinstance(message, dict):
            return None  # a session of a single call has no later requests
        session = self._app.store.ledger.get(self.session.id) or self.session
        responses, match = self.conversation.responses, self._match
        follows, first = asked.previous, asked.unstored
        is_first = not follows and match is not None and match.sequence.choice == 0
        if match is not None and is_first and responses.of(match.sequence.call, session.calls) is not None:
            follows, first = match.sequence.call, match.messages
        stored = StoredResponse(
            follows=follows,
            messages=asked.body["messages"][first:],
            answer={"role": "assistant", **{name: message[name] for name in KEPT_IN_ANSWERS if message.get(name)}},
        )
        return stored if responses.add(self.call, stored, self._app.settings.gateway.max_body_bytes) else None


def _retry_of(request: web.Request) -> int:
    """Return the number of earlier attempts of the request, from the client's retry header. No header counts as 0, a
    header that is not a number as 1.
    """
    text = request.headers.get(RETRIED_HEADER, "")
    return min(int(text), MOST_RETRIES) if text.isascii() and text.isdecimal() and len(text) < 10 else int(bool(text))


def _temperature(body: Mapping[str, Any]) -> float:
    """Return the temperature of a request, by default 1. Engines refuse a value that is not a number."""
    temperature = body.get("temperature")
    return float(temperature) if isinstance(temperature, int | float) else 1.0


def _version_of(answer: Mapping[str, Any]) -> dict[str, str]:
    version = answer.get("weight_version")
    return {} if version is None else {VERSION_HEADER: f"{version[0]}.{version[1]}"}


def _part_of_id(key: str) -> str:
    """Return a key as part of a message id, whose length is limited. A key that is too long becomes its digest."""
    return key if len(key.encode()) <= LONGEST_KEY else hashlib.sha256(key.encode()).hexdigest()


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "code": kind}


async def _parsed(request: web.Request, kind: type[Any]) -> Any:
    """Return the validated body of a request to a session route.

    Raises:
        ContentError: The body is not a JSON object, or contains a value that no message can carry.
        BadRequest: The body is invalid. The error names the field, the received value and the accepted values.
    """
    try:
        return kind.model_validate(await read_json(request))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadRequest(f"unknown field {where!r}; known: {', '.join(sorted(kind.model_fields))}", where) from None
        raise BadRequest(f"{where}: {first['msg']}, got {first['input']!r:.80}", where) from None
