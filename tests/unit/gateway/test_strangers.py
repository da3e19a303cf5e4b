"""The gateway against strangers: scopes, forged requests, bodies without a key, guessed ids, rubbish in every place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.security_tables import rows
from tests.unit.gateway.serving import Serving, serving, serving_config
from trinity_mq.gateway.access import KEY_BEGINS
from trinity_mq.gateway.app import PROTOCOLS
from trinity_mq.gateway.protocols.base import BadRequest
from trinity_mq.gateway.rules import MAX_METRICS, MAX_REWARD
from trinity_mq.gateway.session import Session
from trinity_mq.gateway.session_store import MemorySessionStore
from trinity_mq.messages.sessions import SCOPES

ASK = {"messages": [{"role": "user", "content": "2+3?"}]}
ADMIN = "an admin's secret key"
JSON = {"Content-Type": "application/json"}


def say(prompt: str) -> str:
    return "5"


async def test_an_answer_tells_the_state_to_those_who_may_read() -> None:
    async with serving(say, admin=ADMIN) as at:
        made = await at.open(key=ADMIN, scopes=["reward"], labels={"who": "secret"})
        _, answer = await at.post(f"/s/{made['id']}/reward", {"reward": 1}, key=made["key"])
        assert answer == {"accepted": True, "repeated": False, "id": made["id"]}
        _, answer = await at.post(f"/s/{made['id']}/reward", {"reward": 1}, key=ADMIN)
        assert answer["labels"] == {"who": "secret"}


TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
FORGED = [
    *(({"Host": host}, 403) for host in ("evil.example:8710", "127.0.0.1.evil.example", "", "0.0.0.0:8710")),
    *(({"Origin": origin}, 403) for origin in ("https://evil.example", "null")),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    *(({"Content-Type": name}, 415) for name in TYPES),
]
OWN = [
    {},
    *({"Host": host} for host in ("localhost:8710", "[::1]:8710", "GATEWAY.local", "public.example")),
    {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Content-Type": "application/json; charset=utf-8"},
]


async def test_a_gateway_without_keys_refuses_what_a_web_page_can_send() -> None:
    gateway = {"allowed_hosts": ["gateway.local"], "public_url": "https://public.example/path"}
    async with serving(say, config=serving_config(gateway=gateway)) as at:
        for headers, wanted in FORGED:
            for body in (b"{}", b""):
                if wanted == 415 and not (body or headers["Content-Type"]):
                    continue  # neither a body nor a type: what `curl -X POST` sends
                status, answer = await _raw(at, "POST", "/sessions", {**JSON, **headers}, body)
                assert status == wanted, (headers, body, answer)
        assert len(at.store.ledger.live) == 0
        for headers in OWN:
            assert (await _raw(at, "POST", "/sessions", {**JSON, **headers}, b"{}"))[0] == 201, headers
        assert (await _raw(at, "POST", "/commit", {}, b""))[0] == 200, "an empty body needs no type"
    async with serving(say, admin=ADMIN) as at:  # no page has the key
        headers = {"Host": "balancer.example", "Authorization": f"Bearer {ADMIN}", "Content-Type": "text/plain"}
        assert (await _raw(at, "POST", "/sessions", headers, b"{}"))[0] == 201


async def _raw(at: Serving, verb: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Send exactly these headers (an empty one is left out, but for Host); return status and answer."""
    sent = {"Host": at.url.removeprefix("http://"), **headers}
    fields = [f"{name}: {value}" for name, value in sent.items() if value or name == "Host"]
    ends = (f"Content-Length: {len(body)}", "Connection: close", "", "")
    head = "\r\n".join([f"{verb} {path} HTTP/1.1", *fields, *ends])
    return await _answered(at, head.encode("utf-8", "surrogateescape") + body)


async def _answered(at: Serving, data: bytes, *, closes: bool = True) -> tuple[int, str]:
    answer = await _exchange(at, data, closes=closes)
    return int(answer.split()[1]), answer


async def _exchange(at: Serving, data: bytes, *, closes: bool = True) -> str:
    """Send bytes as they are; return the answer: all until the connection is closed, or its first piece."""
    host, _, port = at.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            answer = b"" if closes else await reader.readuntil(b"\r\n\r\n")
            answer += await reader.read(-1 if closes else 65536)
    finally:
        writer.close()
    return answer.decode(errors="replace")


ROUTES = [
    ("POST", "/sessions"),
    ("POST", "/s/{id}/reward"),
    ("POST", "/s/{id}/end"),
    ("POST", "/s/unknown/end"),
    ("DELETE", "/s/{id}"),
    ("POST", "/feedback"),
    ("POST", "/commit"),
    *(("POST", f"{prefix}{path}") for prefix in ("", "/s/{id}", "/s/unknown") for path in PROTOCOLS),
]


@pytest.mark.parametrize("expects", [False, True])
async def test_strangers_are_refused_before_their_body_comes(expects: bool) -> None:
    async with serving(say, admin=ADMIN) as at:
        made = await at.open(key=ADMIN)
        for verb, path in ROUTES:
            for key in ("", "Authorization: Bearer wrong\r\n", f"Authorization: Bearer {KEY_BEGINS}wrong\r\n"):
                head = f"{verb} {path.format(id=made['id'])} HTTP/1.1\r\nHost: x\r\n{key}"
                head += "Expect: 100-continue\r\n" if expects else ""
                head += "Content-Type: application/json\r\nContent-Length: 8000000\r\n\r\n"
                status, answer = await _answered(at, head.encode() + (b"" if expects else b'"aaa'), closes=False)
                assert status == 401, (verb, path, key, answer)
                assert "Connection: close" in answer


async def test_a_client_that_asks_before_it_sends_is_told_to_go_on() -> None:
    async with serving(say, admin=ADMIN) as at:
        made = await at.open(key=ADMIN)
        headers = {**JSON, "Authorization": f"Bearer {made['key']}"}
        url = f"{made['base_url']}/chat/completions"
        async with at.http.post(url, data=json.dumps(ASK), headers=headers, expect100=True) as response:
            assert response.status == 200
        status, _ = await _raw(at, "POST", f"/s/{made['id']}/end", {**headers, "Expect": "200-maybe"}, b"{}")
        assert status == 417


async def test_the_time_of_an_answer_does_not_tell_which_ids_exist() -> None:
    """A stream's store waits for what it does not know: it must be asked the same, whether an id exists or not."""
    asked: list[str] = []

    class Asked(MemorySessionStore):
        async def find(self, session: str) -> Session | None:
            asked.append("session")
            return await super().find(session)

        async def find_key(self, key_hash: str) -> Session | None:
            asked.append("key")
            return await super().find_key(key_hash)

    async with serving(say, admin=ADMIN, store=Asked()) as at:
        made, other = await at.open(key=ADMIN), await at.open(key=ADMIN)
        await at.post(f"/s/{made['id']}/end", {"outcome": "discard"}, key=ADMIN)
        for key, lookups in (("", []), ("guess", []), (f"{KEY_BEGINS}guess", ["key"]), (other["key"], ["key"])):
            seen = []
            for name in (made["id"], "0" * 32):
                asked.clear()
                status, answer = await at.get(f"/s/{name}", key=key)
                seen.append((status, answer, list(asked)))
            assert seen[0] == seen[1]
            assert seen[0][0] == 401
            assert seen[0][2] == lookups
        asked.clear()
        assert (await at.get(f"/s/{made['id']}", key=made["key"]))[0] == 200
        assert asked == [], "who has the key of a session that is known here waits for nothing"


OF_THE_RUN = ("reward", "reward:sum", "time/run_execution", "session_calls", "response_tokens:sum", "slices/finished")


@pytest.mark.parametrize(
    "metrics",
    [
        *({name: 1.0} for name in (*OF_THE_RUN, "", "x" * 101, "a b", "\x1b[2J")),
        *({"tries": value} for value in ("nan", "inf", 1e31)),
        {f"m{number}": 1.0 for number in range(MAX_METRICS + 1)},
    ],
)
async def test_metrics_of_agents_are_finite_few_and_never_the_runs_own(metrics: dict[str, Any]) -> None:
    async with serving(say) as at:
        made = await at.open()
        for path, body in (("reward", {"reward": 1}), ("end", {})):
            status, answer = await at.post(f"/s/{made['id']}/{path}", {**body, "metrics": metrics})
            assert status == 400, answer
            assert "metric" in answer["error"]["message"]
        assert at.session(made["id"]).metrics == {}
        good = {"tries": 2, "judge/score:max": 0.5, "x@1": -1e30}
        assert (await at.post(f"/s/{made['id']}/end", {"metrics": good}))[1]["metrics"] == good


async def test_many_reports_leave_metrics_and_rewards_bounded() -> None:
    async with serving(say) as at:
        made = await at.open()
        for number in range(3):
            metrics = {f"m{number}.{each}": 1.0 for each in range(MAX_METRICS - 10)}
            body = {"reward": MAX_REWARD, "how": "add", "metrics": metrics}
            assert (await at.post(f"/s/{made['id']}/reward", body))[0] == 200
        session = at.session(made["id"])
        assert len(session.metrics) == MAX_METRICS
        assert session.reward == MAX_REWARD


BIG, HALF = 10**40, "\ud800"
VALUES: list[Any] = [BIG, -BIG, 1 << 64, 1e308, HALF, "\x00", "\x1b[2J", "x" * 300_000, None, True, [], {}, [HALF]]
VALUES += [{HALF: 1}, {"a": {"b": [BIG]}}, "nan", "-inf", -1, 0.5]
FIELDS = {
    "/sessions": ["task", "group", "group_size", "labels", "ttl", "idle_ttl", "record", "scopes"],
    "/s/{id}/reward": ["reward", "call", "choice", "how", "key", "metrics", "final"],
    "/s/{id}/end": ["outcome", "reward", "metrics", "replay", "reason"],
    "/feedback": ["reward", "msg_ids", "task_id", "run_id"],
}
ASKED = "messages input prompt system instructions tools tool_choice stream_options metadata model temperature top_p n "
ASKED += "max_tokens max_completion_tokens stop stop_sequences seed logprobs top_logprobs top_k min_p user stream "
ASKED += "logit_bias presence_penalty frequency_penalty repetition_penalty continue_tokens response_format min_tokens "
ASKED += "ignore_eos parallel_tool_calls text output_config continue_messages"
FIELDS |= {f"/s/{{id}}{path}": ASKED.split() for path in PROTOCOLS}
BASE: dict[str, Any] = {
    "/s/{id}/reward": {"reward": 1},
    "/feedback": {"reward": 1, "msg_ids": ["m"]},
    "/s/{id}/v1/completions": {"prompt": "x"},
    "/s/{id}/v1/responses": {"input": "x"},
    "/s/{id}/v1/messages": {**ASK, "max_tokens": 3},
    "/s/{id}/v1/chat/completions": ASK,
}
BODIES = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 500 + b"]" * 500 + b', "task": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"reward": NaN, "messages": NaN, "task": {"a": Infinity}}',
    b'{"reward": 1e999, "temperature": 1e999, "task": {"a": -1e999}}',
    b'{"reward": ' + b"9" * 5000 + b"}",
    b'{"task": "\xed\xa0\x80"}',
    '{"task": {}}'.encode("utf-16"),
    b"\xff\xfe",
    b"null",
    b'"x"',
    b"\x00",
    b"{}{}",
]
"""Bodies that are refused on every route that takes one."""


def _faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_no_value_in_a_body_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(say, config=serving_config(gateway={"calls_per_minute": 10**6, "max_calls": 10**6})) as at:
        made = await at.open(record="eval")
        for route, fields in FIELDS.items():
            path = route.format(id=made["id"])
            for body in BODIES:
                status, answer = await _send(at, path, body)
                assert 400 <= status < 500, (path, body[:60], answer)
            for field in fields:
                for value in VALUES:
                    body = json.dumps({**BASE.get(route, {}), field: value}).encode()
                    status, answer = await _send(at, path, body)
                    assert status < 500, (path, field, value, answer)
                    if value in (BIG, -BIG, 1 << 64, HALF):
                        assert status == 400, (path, field, value, answer)
                        assert field in answer, (path, field, value, answer)
    assert _faults(caplog) == []


async def _send(at: Serving, path: str, body: bytes) -> tuple[int, str]:
    async with at.http.post(at.url + path, data=body, headers=JSON) as response:
        return response.status, await response.text()


BYTE = "\udcff"
FIELD_VALUES = {
    "Authorization": [BYTE, "Bearer \udced\udca0\udc80", "Bearer " + "x" * 8000, "Bearer"],
    "X-Session-Key": [f"{KEY_BEGINS}{BYTE}"],
    "X-Session-ID": [BYTE, "../" * 50],
    "Host": [BYTE, "[::1"],
    "Origin": [f"http://[{BYTE}"],
    "Content-Encoding": ["gzip", "br", BYTE],
    **{name: [BYTE] for name in ("x-api-key", "traceparent", "x-stainless-retry-count", "Content-Type", "Expect")},
}
HEADERS = [{name: value} for name, values in FIELD_VALUES.items() for value in values]
PATHS = ["/s/%FF", "/s/%00", "/s/" + "x" * 4000, "/s/%ED%A0%80/v1/models", "/sessions?%FF=%FF&limit=" + "9" * 100]
PATHS += [f"/s/%2Fv1%2F{path}" for path in PROTOCOLS]
PATHS += ["/sessions?group=x&limit=" + "9" * 5000]
PATHS += ["/sessions?state=%00", "/s/../../x", "/%ff", "//", "/s//", "/v1/%FF", "/sessions?limit=\u00b2"]


@pytest.mark.parametrize("admin", ["", ADMIN])
async def test_no_byte_in_a_head_is_a_fault(admin: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(say, admin=admin) as at:
        made = await at.open(key=admin)
        known = {"Authorization": f"Bearer {admin}"} if admin else {}
        for headers in HEADERS:
            for verb, path in (*ROUTES, ("GET", "/s/{id}"), ("GET", "/sessions"), ("GET", "/v1/models")):
                sent = {**JSON, **known, **headers}
                status, answer = await _raw(
                    at, verb, path.format(id=made["id"]), sent, b"{}" if verb == "POST" else b""
                )
                assert status < 500, (headers, path, answer)
        for path in PATHS:
            for verb in ("GET", "POST", "DELETE", "PUT"):
                status, answer = await _raw(at, verb, path, {**JSON, **known})
                assert status < 500, (path, answer)
        twice = f"GET /sessions HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n{_line(known)}"
        twice += "Connection: close\r\n\r\n"
        assert (await _answered(at, twice.encode()))[0] in ({200, 400} if admin else {400, 403})
        chunked = f"POST /sessions HTTP/1.1\r\nHost: localhost\r\n{_line(known)}Content-Type: application/json\r\n"
        chunked += "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n"
        assert (await _answered(at, chunked.encode()))[0] == 400
    assert _faults(caplog) == []


def _line(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


async def test_agents_hear_that_an_engine_is_lost_and_never_its_address() -> None:
    async with serving(say, timeout=0.2) as at:
        made = await at.open(record="eval")
        address = at.engines.models[0].url.removeprefix("http://")
        for path in PROTOCOLS:
            for streams in (False, True):
                for value in (-1, "hot"):
                    body = {**BASE[f"/s/{{id}}{path}"], "temperature": value, "stream": streams}
                    status, answer = await at.post(f"/s/{made['id']}{path}", body)
                    assert status == 400, answer
                    assert address not in json.dumps(answer)
        text = json.dumps((await at.post(f"/s/{made['id']}/v1/chat/completions", {**ASK, "temperature": -1}))[1])
        assert "temperature: Input should be greater than or equal to 0" in text, "the engine's words stay"
        at.engines.models = [type(at.engines.models[0])("gone", "http://127.0.0.1:9", "gone")]
        for path in PROTOCOLS:
            for streams in (False, True):
                body = {**BASE[f"/s/{{id}}{path}"], "stream": streams}
                async with at.http.post(f"{at.url}/s/{made['id']}{path}", json=body) as response:
                    assert (response.status, response.headers["Retry-After"]) == (502, "1")
                    text = await response.text()
                assert "is lost" in text
                assert "127.0.0.1" not in text
        assert at.session(made["id"]).asked == 0


async def test_a_body_that_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.runtime.http.BODY_SECONDS", 0.2)
    async with serving(say) as at:
        head = "POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        status, answer = await _answered(at, (head + "\r\n{").encode(), closes=False)
        assert status == 408, answer
        assert "the body was not complete within 0.2 s" in answer


async def test_a_reward_with_a_long_key_counts_once_too() -> None:
    """An id of more than 255 bytes has no place in a message."""
    ids: list[str] = []

    class Noting(MemorySessionStore):
        async def report(self, event: Any, message_id: str) -> Any:
            ids.append(message_id)
            return await super().report(event, message_id)

    async with serving(say, store=Noting()) as at:
        made, repeated = await at.open(), []
        for key in ("\u00e9" * 200, "\u00e9" * 200, "k" * 200):
            _, shown = await at.post(f"/s/{made['id']}/reward", {"reward": 1, "how": "add", "key": key})
            repeated.append(shown["repeated"])
        assert repeated == [False, True, False]
        assert at.session(made["id"]).reward == 2.0
        assert max(len(name.encode()) for name in ids) < 200


async def test_connections_without_a_whole_head_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.runtime.http.HEAD_SECONDS", 0.3)
    async with serving(say) as at:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for data in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-a: ", whole, whole + b"GET /health HTTP/1.1\r\nX:"):
            await _exchange(at, data)
        async with aiohttp.ClientSession() as http, http.get(f"{at.url}/health") as response:
            assert response.status == 200


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("model", "messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "stream_options")
NAMES += (
    "thinking",
    "output_config",
    "reasoning",
    "text",
    "include",
    "store",
    "previous_response_id",
    "stop_sequences",
)
PARTS = st.fixed_dictionaries({"type": st.just("text") | ANYTHING}, optional={"text": ANYTHING, "thinking": ANYTHING})
TYPES_OF_ITEMS = ("message", "function_call", "function_call_output", "local_shell_call", "reasoning", "thinking")
TYPES_OF_ITEMS += ("redacted_thinking", "text", "tool_use", "tool_result", "tool_reference", "x")
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES_OF_ITEMS) | ANYTHING,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | ANYTHING,
        "content": ANYTHING | st.lists(PARTS, max_size=2),
        "name": ANYTHING,
        "output": ANYTHING,
        "input": ANYTHING,
    },
)
REQUESTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ANYTHING | st.lists(ITEMS | ANYTHING, max_size=3)))


@pytest.mark.parametrize("path", PROTOCOLS)
@settings(max_examples=examples(300), deadline=None)
@example({"messages": [{"role": "user", "content": [{"type": []}]}]})
@given(REQUESTS)
def test_no_request_is_a_fault(path: str, body: dict[str, Any]) -> None:
    protocol = PROTOCOLS[path]
    with contextlib.suppress(BadRequest):  # refused in words: every other error fails the test
        json.dumps(protocol.request(body).body)


ALL = [*SCOPES, "replay"]
COLUMNS, *ROWS = rows("Keys of the gateway")
SENT: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "2+3?"}]},
    "/reward": {"reward": 1.0, "final": False},
    "/end": {"outcome": "done", "reward": None, "metrics": {}},
    "/reward with `final`": {"reward": 1.0, "final": True},
    "/end with a reward": {"reward": 0.0},
    "/end with metrics": {"metrics": {"tries": 1.0}},
    "/end with a replay": {"replay": {"workflow": "async_simple_workflow", "runs": 2}},
    "/feedback": {"reward": 1.0, "msg_ids": ["unknown"]},
}
ALLOWED = re.compile(r"`(GET|POST|DELETE) ([^`]+)`( with (?:a replay|a reward|metrics|`final`))?")


async def is_allowed(at: Serving, request: str, key: str, session: str) -> bool:
    match = ALLOWED.fullmatch(request)
    assert match is not None, f"{request} is no request that this test can make"
    method, path, more = match.groups()
    body = next((body for end, body in SENT.items() if f"{path}{more or ''}".endswith(end)), {})
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = at.url + path.replace("<id>", session)
    async with at.http.request(method, url, headers=headers, json=None if method == "GET" else body) as response:
        assert response.status in {200, 201, 401, 403, 404}, await response.text()
        return response.status not in {401, 403}


async def own(at: Serving, request: str, scopes: Sequence[str]) -> bool:
    """Return whether a request is allowed with the key of its session, which has these scopes."""
    made = await at.open(key=ADMIN, scopes=list(scopes))
    allowed = await is_allowed(at, request, made["key"], made["id"])
    session = at.session(made["id"])
    assert allowed or (session.end, session.reward, session.metrics) == (None, None, {})
    return allowed


def test_the_table_has_all_routes_but_those_of_other_apis() -> None:
    assert COLUMNS == ["request", "scopes of the session's key", "admin key", "no key"]
    paths = {"/sessions", "/feedback", "/commit", "/health", "/s/<id>", "/s/<id>/reward", "/s/<id>/end"}
    assert paths <= {match[2] for row in ROWS if (match := ALLOWED.fullmatch(row[0]))}


@pytest.mark.parametrize(("request_", "scopes", "admin", "nobody"), ROWS, ids=[row[0] for row in ROWS])
async def test_each_key_may_do_what_the_table_says(request_: str, scopes: str, admin: str, nobody: str) -> None:
    needed = re.findall(r"`(\w+)`", scopes)
    async with serving(lambda _: "5", admin=ADMIN) as at:

        async def fresh() -> str:
            return str((await at.open(key=ADMIN))["id"])

        assert await is_allowed(at, request_, ADMIN, await fresh()) == (admin == "yes")
        assert await is_allowed(at, request_, "", await fresh()) == (nobody == "yes")
        other = await at.open(key=ADMIN, scopes=ALL)
        assert await is_allowed(at, request_, other["key"], await fresh()) == (nobody == "yes"), "of another session"
        assert await own(at, request_, ALL) == (bool(needed) or nobody == "yes")
        if needed:
            assert await own(at, request_, needed), "these scopes suffice"
        for missing in needed:
            assert not await own(at, request_, [one for one in ALL if one != missing]), f"without {missing}"


async def test_a_key_that_is_given_no_scopes_may_not_replay() -> None:
    async with serving(lambda _: "5", admin=ADMIN) as at:
        made = await at.open(key=ADMIN)
        replay = SENT["/end with a replay"]
        status, answer = await at.post(f"/s/{made['id']}/end", replay, key=made["key"])
        assert (status, answer["error"]["code"]) == (403, "scope_missing")
        assert at.session(made["id"]).end is None


@pytest.mark.parametrize(
    ("replay", "named"),
    [
        ({"workflow": "program_workflow", "workflow_args": {"command": ["true"]}}, "outsiders.workflows"),
        ({"workflow": "os.path.join"}, "outsiders.workflows"),
        ({"workflow": "async_simple_workflow", "workflow_args": {"judge": "x"}}, "workflow_args.'judge'"),
        ({"workflow": "recorded_sessions"}, "outsiders.workflows"),
    ],
)
async def test_nobody_replays_what_is_not_open(replay: dict[str, Any], named: str) -> None:
    """Not even an admin, and on loopback nobody without a key."""
    for admin in (ADMIN, ""):
        async with serving(lambda _: "5", admin=admin) as at:
            made = await at.open(key=admin, scopes=ALL)
            for key in (admin, made["key"]):
                status, answer = await at.post(f"/s/{made['id']}/end", {"replay": {"runs": 2, **replay}}, key=key)
                assert (status, answer["error"]["code"]) == (403, "not_allowed")
                assert named in answer["error"]["message"]
            assert at.session(made["id"]).end is None
