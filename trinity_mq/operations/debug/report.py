"""Reports of ``trinity-mq debug``: text for a person, or JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TextIO

from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody
from trinity_mq.observability.experiences.show_experience import (
    as_json,
    line,
    open_console,
    print_experience,
    print_title,
)
from trinity_mq.observability.experiences.token_texts import TokenTexts
from trinity_mq.operations.debug.errors import WorkflowFailure
from trinity_mq.operations.debug.proxy import ProxiedCall
from trinity_mq.operations.debug.show_call import call_json, show_call
from trinity_mq.scheduling import Status
from trinity_mq.telemetry.jsonline import dump_line


class JsonReport:
    """Writes one JSON object per line, each with an ``event``: task, call, experience or end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def task(self, number: int, body: TaskBody) -> None:
        """Write the task in its published form."""
        self._write("task", {"number": number, "task": body.model_dump(mode="json")})

    def call(self, call: ProxiedCall, texts: TokenTexts) -> None:
        """Write request and answer."""
        self._write("call", call_json(call, texts))

    def experience(self, experience: Experience, texts: TokenTexts) -> None:
        """Write all fields of the experience."""
        self._write("experience", as_json(experience, texts))

    def end(self, status: Status, calls: int, failure: WorkflowFailure | None) -> None:
        """Write status, metrics and error."""
        error = None if failure is None else dataclasses.asdict(failure)
        metrics = status.metrics[0] if status.metrics else {}
        self._write(
            "end", {"ok": status.ok, "message": status.message, "metrics": metrics, "calls": calls, "error": error}
        )

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        self._out.write(dump_line({"event": event, **fields}) + "\n")
        self._out.flush()


class TextReport:
    """Prints the report for a person."""

    def __init__(self, out: TextIO) -> None:
        self._console = open_console(out)

    def task(self, number: int, body: TaskBody) -> None:
        """Print the task."""
        print_title(self._console, f"task {number}: {body.workflow}", "green")
        for name, value in body.raw_task.items():
            self._line(name, value if isinstance(value, str) else json.dumps(value, default=repr))
        for name in ("reward_fn", "reward_fn_args", "workflow_args", "rollout_args"):
            if value := getattr(body, name):
                self._line(name, str(value))

    def call(self, call: ProxiedCall, texts: TokenTexts) -> None:
        """Print request and answer."""
        show_call(self._console, call, texts)

    def experience(self, experience: Experience, texts: TokenTexts) -> None:
        """Print the experience, token by token."""
        print_experience(self._console, experience, texts)

    def end(self, status: Status, calls: int, failure: WorkflowFailure | None) -> None:
        """Print status, metrics and error."""
        print_title(self._console, "finished" if status.ok else "failed", "green" if status.ok else "red")
        self._line("calls", str(calls))
        for name, value in (status.metrics[0] if status.metrics else {}).items():
            self._line("metric", f"{name} = {value:g}")
        if status.message:
            self._line("message", status.message)
        if failure is not None:
            verb = "was at" if failure.was_interrupted else "failed at"
            self._line(verb, f"{failure.file}:{failure.line} in {failure.function}")
            self._line("", failure.traceback)

    def _line(self, name: str, value: str) -> None:
        line(self._console, name, value)


Report = JsonReport | TextReport
