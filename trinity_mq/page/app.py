"""HTTP routes of the page: its files, the run's state as server-sent events, and details as JSON. Other functions
read run folders for these routes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from trinity_mq.bus import BusError
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.experiences.evaluations import evaluation_sets, question_history
from trinity_mq.observability.experiences.show_experience import as_json
from trinity_mq.observability.experiences.token_texts import TokenTexts, tokenizer_folder
from trinity_mq.observability.follow import MetricsTail
from trinity_mq.observability.prometheus.families import RunCollector
from trinity_mq.observability.prometheus.handler import metrics_handler
from trinity_mq.observability.run_list import find_runs, row
from trinity_mq.observability.samples import COLUMNS, MOST_ROWS, experience_at
from trinity_mq.observability.timeline import Span
from trinity_mq.page.access import PageAccess
from trinity_mq.page.actions import ActionError, BrokerActions
from trinity_mq.page.run_page import RunPage
from trinity_mq.runtime.http import new_application, read_json
from trinity_mq.runtime.notify import Notifier
from trinity_mq.targets.target import RUNS, find_configuration
from trinity_mq.telemetry.evaluations.log import Evaluation
from trinity_mq.telemetry.jsonline import dump_line

log = structlog.get_logger(__name__)

EVENT_SECONDS = 1.0
"""Seconds between two states sent to a page."""
MOST_SPANS = 3000
PAGE_FILES: Mapping[str, str] = {
    "index.html": "text/html",
    "dash.css": "text/css",
    "dash.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
STATIC = files("trinity_mq.page") / "static"

Runs = Callable[[], list[dict[str, Any]]]


class DashApp:
    """All routes of the page of one run.

    Args:
        run: The displayed run.
        actions: Requests to the broker.
        access: Checks the access of each request.
        texts: Returns the known texts of tokens.
        runs: Returns a row for each run folder that the page lists.
        evaluations: Returns the evaluations with stored answers; may raise OSError.
        others: Curves of other runs to draw for comparison, by run name.
    """

    def __init__(
        self,
        run: RunPage,
        actions: BrokerActions,
        access: PageAccess,
        texts: Callable[[], TokenTexts],
        *,
        runs: Runs = list,
        evaluations: Callable[[], list[Evaluation]] = list,
        others: Mapping[str, Curves] | None = None,
    ) -> None:
        self._run, self._actions, self._access, self._texts = run, actions, access, texts
        self._runs, self._evaluations, self._others = runs, evaluations, others or {}
        self._state = ""
        self._changed = Notifier()
        self._closing = False

    def application(self) -> web.Application:
        """Return the application."""
        made = new_application([self._access.middleware, self._errors])
        made.add_routes(
            [
                web.get("/", self.page),
                web.get("/static/{name}", self.static),
                web.get("/events", self.events),
                web.get("/metrics", metrics_handler(RunCollector(self._run.state, time.time))),
                web.get("/api/state", self.state),
                web.get("/api/timeline", self.timeline),
                web.get("/api/samples", self.samples),
                web.get("/api/sample", self.sample),
                web.get("/api/curves", self.curves),
                web.get("/api/curve", self.curve),
                web.get("/api/evaluations", self.evaluations),
                web.get("/api/evaluation", self.evaluation),
                web.get("/api/runs", self.runs),
                web.get("/api/dead", self.dead),
                web.post("/api/dead/replay", self.replay),
                web.get("/api/reviews", self.reviews),
                web.post("/api/reviews/{request}", self.give_verdict),
                web.post("/api/agents/{agent}/{verb}", self.control),
            ]
        )
        made.on_shutdown.append(self._close)
        return made

    async def _close(self, _: web.Application) -> None:
        self._closing = True
        self._changed.notify()

    async def tick(self) -> None:
        """Loop: call :meth:`renew` every second, until cancelled."""
        while True:
            self.renew()
            await asyncio.sleep(EVENT_SECONDS)

    def renew(self) -> None:
        """Advance the run's state to the current time, and send it to all open pages."""
        self._run.tick()
        self._state = ""
        self._changed.notify()

    def _current(self) -> str:
        """Return the state as JSON. It is computed at most once a second, and only on request."""
        self._state = self._state or dump_line(self._run.as_map() | {"operate": self._access.operate})
        return self._state

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ActionError, BusError, CommandError) as error:
            return _json({"error": str(error)}, status=409)
        except OSError as error:
            return _json({"error": f"the run's folder cannot be read: {error.strerror or error}"}, status=409)
        except ValueError as error:
            return _json({"error": str(error)}, status=400)

    async def page(self, _: web.Request) -> web.Response:
        """Return the HTML page."""
        return _file("index.html")

    async def static(self, request: web.Request) -> web.Response:
        """Return a static file of the page."""
        name = request.match_info["name"]
        if name not in PAGE_FILES:
            raise web.HTTPNotFound
        return _file(name)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send the state every second as server-sent events."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        try:
            while not self._closing:
                await response.write(f"event: state\ndata: {self._current()}\n\n".encode())
                await self._changed.wait()
        except ConnectionResetError:  # the browser closed the page
            log.debug("page_closed")
        return response

    async def state(self, _: web.Request) -> web.Response:
        """Return the current state."""
        return web.Response(text=self._current(), content_type="application/json")

    async def timeline(self, request: web.Request) -> web.Response:
        """Return the states and activities of agents in the last ``seconds`` before now, or before the end of the last
        activity if the page is not connected to the broker. At most :data:`MOST_SPANS` activities, the latest.
        """
        seconds, activities = _number(request, "seconds", 120.0), self._run.history.activities
        end = round(time.time() if self._run.state.is_live or not activities else activities[-1].end, 2)
        start = end - seconds
        shown = [_activity(span) for span in activities if span.end >= start][-MOST_SPANS:]
        lanes = self._run.history.lanes(start)
        return _json({"start": start, "end": end, "lanes": lanes, "spans": shown})

    async def samples(self, request: web.Request) -> web.Response:
        """Return the rows of the table of samples whose number is above ``after``, and the counts of the table."""
        after = int(_number(request, "after", 0))
        store = self._run.history.samples
        seen_count = store.seen
        self._run.state.problems.extend(await store.decode())
        return _json({"columns": COLUMNS, "last": store.number, "seen": seen_count, "rows": store.rows(after)})

    async def sample(self, request: web.Request) -> web.Response:
        """Return one sample token by token, selected by ``uid``; status 404 if it is not kept."""
        uid = request.query.get("uid", "")
        self._run.state.problems.extend(await self._run.history.samples.decode())
        body = self._run.history.samples.body_of(uid)
        if body is None:
            return _json({"error": f"sample {uid!r} is not kept: the latest {MOST_ROWS} are"}, status=404)
        return _json(await asyncio.to_thread(lambda: as_json(experience_at(*body), self._texts())))

    async def curves(self, _: web.Request) -> web.Response:
        """Return the pictures with the curves of the run and of the other runs, and the names of the run's metrics."""
        curves = self._run.history.curves
        others = {name: run_curves.pictures() for name, run_curves in self._others.items()}
        return _json({"pictures": curves.pictures(), "names": curves.names, "others": others})

    async def curve(self, request: web.Request) -> web.Response:
        """Return the curve of one metric, selected by ``name``."""
        name = request.query.get("name", "")
        return _json({"name": name, "points": self._run.history.curves.named(name)})

    async def evaluations(self, _: web.Request) -> web.Response:
        """Return the questions of all evaluation sets, each with its mean reward at each label."""
        return _json({"sets": evaluation_sets(await asyncio.to_thread(self._evaluations))})

    async def evaluation(self, request: web.Request) -> web.Response:
        """Return one evaluation question, selected by ``set`` and ``task``, with its answers at each label; status 404
        if its answers are not kept.
        """
        name, task = request.query.get("set", ""), int(_number(request, "task", 0))
        answers = question_history(await asyncio.to_thread(self._evaluations), name, task)
        if not answers:
            return _json({"error": f"no answers to question {task} of {name!r} are kept"}, status=404)
        return _json({"set": name, "task": task, "evaluations": answers})

    async def runs(self, _: web.Request) -> web.Response:
        """Return the runs that have a folder here, and the runs on the broker."""
        return _json({"runs": await asyncio.to_thread(self._runs), **await self._actions.runs()})

    async def dead(self, _: web.Request) -> web.Response:
        """Return the dead letters."""
        return _json({"letters": await self._actions.dead_letters()})

    async def replay(self, request: web.Request) -> web.Response:
        """Publish dead batches again."""
        body = await read_json(request)
        batches = body.get("batches", [])
        if not isinstance(batches, list):
            raise ValueError(f"batches is {batches!r}, wanted a list of batches")
        return _json(await self._actions.replay({str(batch) for batch in batches}))

    async def reviews(self, _: web.Request) -> web.Response:
        """Return the rollouts that wait for the verdict of a person."""
        return _json({"reviews": self._actions.reviews()})

    async def give_verdict(self, request: web.Request) -> web.Response:
        """Give a verdict on a rollout."""
        return _json(await self._actions.give_verdict(request.match_info["request"], await read_json(request)))

    async def control(self, request: web.Request) -> web.Response:
        """Send a command to an agent."""
        await self._actions.control(request.match_info["agent"], request.match_info["verb"])
        return _json({"sent": True})


def _file(name: str) -> web.Response:
    return web.Response(body=(STATIC / name).read_bytes(), content_type=PAGE_FILES[name], charset="utf-8")


def _json(fields: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(text=dump_line(fields), content_type="application/json", status=status)


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text!r}, wanted a number")
    return number


def _activity(span: Span) -> dict[str, Any]:
    return {**asdict(span), "start": round(span.start, 2), "end": round(span.end, 2)}


def curves_of(name: str) -> Curves:
    """Return the metrics of another run as curves.

    Raises:
        CommandError: No run folder has the name.
    """
    config = find_configuration(name, ())
    if config is None or not config.path.is_dir():
        raise CommandError(f"--beside {name}: there is no run folder with this name")
    curves = Curves()
    for message in MetricsTail(config.path).read():
        curves.add(message)
    return curves


class LazyTexts:
    """Loads the texts of a run's tokens on first use. They are unknown until the model folder exists.

    Args:
        config: The run's configuration; None: unknown.
    """

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._loaded: TokenTexts | None = None

    def known(self) -> TokenTexts:
        """Return the known texts; retry loading if it failed before."""
        if self._loaded is None or self._loaded.problem:
            config = self._config
            self._loaded = TokenTexts(None if config is None else tokenizer_folder(config.model, config.path))
        return self._loaded


def workflows(config: Config) -> dict[str, str]:
    """Return the workflow of each taskset that has a name, by this name."""
    buffer = config.buffer
    tasksets = [*buffer.training_tasksets, *buffer.eval_tasksets]
    return {taskset.name: str(taskset.workflow) for taskset in tasksets if taskset.name}


def runs(folder: Path | None) -> list[dict[str, Any]]:
    """Return the runs in the parent folder of the run folder ``folder``, or below ``runs`` if ``folder`` is None, as
    JSON objects.
    """
    top = RUNS if folder is None else folder.parent
    return [
        {
            **asdict(row(path)),
            "folder": str(path),
            "here": folder is not None and path.resolve() == folder.resolve(),
        }
        for path in find_runs(top)
    ]
