"""Each row of the table of the gateway's keys in docs/security.md, tried against the real routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.security_tables import rows
from tests.unit.gateway.serving import Serving, serving
from trinity_mq.messages.sessions import SCOPES

ADMIN = "an admin's secret key"
ALL = [*SCOPES, "replay"]
COLUMNS, *ROWS = rows("Keys of the gateway")
BODIES: dict[str, Any] = {
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
    body = next((body for end, body in BODIES.items() if f"{path}{more or ''}".endswith(end)), {})
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
        replay = BODIES["/end with a replay"]
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
