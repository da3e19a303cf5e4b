"""One configured run, from the check of its configuration to its report.

``trinity-mq run`` imports this module after it has started the fork server, because the imports here take half a
second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from trinity_mq.bus.addresses import Addresses
from trinity_mq.config import Config, ConfigError
from trinity_mq.config.modes.mode import TRAINING_MODES
from trinity_mq.errors import CommandError
from trinity_mq.launch.earlier_start import (
    HOW_TO_GO_ON,
    check_data_unchanged,
    describe_extension,
    discard_earlier_run,
    rewind_to_checkpoint,
)
from trinity_mq.launch.exit_codes import closing_line, exit_code
from trinity_mq.launch.session import RunSession
from trinity_mq.observability.display import PlainDisplay, open_display
from trinity_mq.observability.report.text import make_report, save_failures, train_steps, write_evaluations
from trinity_mq.observability.timeline import write_timeline
from trinity_mq.operations.validate import WARNING, check_all, imports_torch
from trinity_mq.runtime.errors import EXIT_FATAL
from trinity_mq.runtime.expected_errors import expected_error
from trinity_mq.runtime.process import claim_folder, disk_full_message
from trinity_mq.runtime.processes.fork_server_process import ForkServer
from trinity_mq.runtime.processes.supervisor import ProcessEvent
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import RUNS
from trinity_mq.telemetry import mask_passwords, setup_logging


def run_configured(
    config: Config, arguments: argparse.Namespace, server: ForkServer | None, stage: str | None = None
) -> int:
    """Check the configuration, run it and print a report. Return the exit code. For a finished run that is not
    extended, only print the report.

    Args:
        config: Configuration of the run.
        arguments: Arguments of ``trinity-mq run``.
        server: Forks the agents. It is closed if ``supervisor.fork`` is false. None: each agent is started as a
            separate command.
        stage: Name of the stage, if the file in ``arguments`` describes several stages.
    """
    if server is not None and not config.supervisor.fork:
        server.close()
        server = None
    folder = RunFolder(config)
    if arguments.fresh and arguments.start:
        raise CommandError("--fresh starts from the first model, and --from from a checkpoint: give only one of them")
    if arguments.fresh:
        check(config, arguments, stage)  # before the folder is moved
        for line in discard_earlier_run(config, folder):
            print(line)
    with folder.locked():
        if arguments.start:
            check(config, arguments, stage)  # before a checkpoint is selected
            folder.changes()
            check_data_unchanged(config)
            for line in rewind_to_checkpoint(config, arguments.start):
                print(line)
        elif folder.finished:
            extended = describe_extension(config, folder.changes())
            if extended is None:
                _print_report(config, folder)
                print(f"this run has finished: {HOW_TO_GO_ON}")
                return exit_code(finished=True, steps=train_steps(folder.path), trains=_trains(config))
            print(extended)
        if not (arguments.fresh or arguments.start):
            check(config, arguments, stage)
            folder.changes()  # settings that must not change raise an error before the slower data check
            check_data_unchanged(config)
        for change in folder.write_configuration():
            print(f"warning: changed since the last start: {change}", file=sys.stderr)
        folder.unmark_finished()
        claim_folder(folder.path)
        broker = Addresses.of(config.broker)
        if broker is not None:
            broker.read()  # report problems with the broker's address before the start
        url = None if broker is None else broker.text()
        setup_logging(
            "supervisor",
            "supervisor",
            folder.path,
            config.monitor.log_level,
            run=config.name,
            max_bytes=config.monitor.log_max_bytes,
        )
        return _run(config, folder, url, arguments, server)


def check(config: Config, arguments: argparse.Namespace, stage: str | None = None) -> None:
    """Run the checks of ``trinity-mq validate`` before the start, and print their warnings. Checks that need torch run
    in a child process, so that this process does not import torch.

    Raises:
        ConfigError: The configuration has a problem.
    """
    if not imports_torch(config):
        _print_warnings(check_all(config))
        return
    argv = ["validate", *(["--stage", stage] if stage else []), arguments.target, *arguments.overrides]
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(done.stderr.strip().removeprefix("trinity-mq validate: "))
    _print_warnings(done.stdout.splitlines())


def _print_warnings(lines: Iterable[str]) -> None:
    for line in lines:
        if WARNING in line:
            print(line, file=sys.stderr)


def _run(
    config: Config, folder: RunFolder, url: str | None, arguments: argparse.Namespace, server: ForkServer | None
) -> int:
    display = PlainDisplay(sys.stdout) if arguments.plain else open_display()
    session = RunSession(config, folder, display, url, server, attached=arguments.attached)
    try:
        asyncio.run(session.run())
    except Exception as error:
        if not session.started or (problem := expected_error(error)) is None:
            raise
        print(mask_passwords(f"the run has ended: {problem}"), file=sys.stderr)
    finally:
        display.close()
    for failure in session.failures:
        print(_failure_report(failure, folder.logs), file=sys.stderr)
    try:
        if session.finished:
            folder.mark_finished()
        save_failures(folder.path, session.state.failures)
        with contextlib.suppress(CommandError):  # no agent did any timed work
            write_timeline(folder.path)
    except OSError as error:  # such as a full disk: the report is printed anyway
        print(f"warning: {disk_full_message(error) or error}", file=sys.stderr)
    _print_report(config, folder)
    command = shlex.join(["trinity-mq", "run", arguments.target, *arguments.overrides])
    code = (
        128 + session.signal
        if session.signal
        else exit_code(finished=session.finished, steps=session.steps, trains=_trains(config))
    )
    curable = all(failure.code != EXIT_FATAL for failure in session.failures)
    if (line := closing_line(code, command, finished=session.finished, curable=curable)) is not None:
        print(line)
    return code


def _print_report(config: Config, folder: RunFolder) -> None:
    print(make_report(config.name, folder.path, config.mode))
    run = config.name if config.path == RUNS / config.name else shlex.quote(str(folder.path))
    print(f"next: trinity-mq dash {run} shows the run, trinity-mq inspect {run} --last its experiences token by token")
    if config.mode == "bench":
        for line in write_evaluations(folder.path):
            print(line)
        print(_plot(config))


def _plot(config: Config) -> str:
    from trinity_mq.observability.report.page import write_report

    try:
        return f"the plot is in {write_report(config)}"
    except CommandError as error:
        return f"there is no plot: {error}"


def _trains(config: Config) -> bool:
    return config.mode in TRAINING_MODES


def _failure_report(failure: ProcessEvent, logs: Path) -> str:
    output, code = f"\n  {failure.output}" if failure.output else "", failure.code
    return (
        f"{failure.name} failed permanently (exit code {code}): {failure.reason}; see {logs / failure.name}.*{output}"
    )
