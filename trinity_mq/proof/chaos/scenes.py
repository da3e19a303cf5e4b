"""Trials of a run started for the trial, of a running local run, and of a run in containers or pods."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.bus.addresses import URL_VARIABLE, Addresses, each
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.launch.earlier_start import discard_earlier_run
from trinity_mq.messages import ControlEvent
from trinity_mq.proof.chaos.schedule import ChaosSchedule, draw, load, save
from trinity_mq.proof.chaos.sessions.clients import clients_of
from trinity_mq.proof.chaos.targets.base import FaultTargets
from trinity_mq.proof.chaos.targets.local import MARK_VARIABLE, LocalTargets
from trinity_mq.proof.chaos.targets.marks import ArmedPoints
from trinity_mq.proof.chaos.tokens import WeightArchive
from trinity_mq.proof.chaos.trial import Plan, TrialOutcome, judge, run_trial
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.processes.chaos_points import POINTS_VARIABLE
from trinity_mq.targets.connection import connect_bus, find_target, open_bus
from trinity_mq.targets.private_broker import private_broker
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import load_target_configuration, load_target_stages
from trinity_mq.testing.tcp_proxy import FaultProxy
from trinity_mq.transport.blobs import open_store

RESTARTS = ("supervisor.max_restarts=100000", "supervisor.restart_window=5")
"""Settings of a run that is started for faults. With the defaults, its supervisor would wait longer before each
restart, and give up after the restarts that the faults cause."""
OUTPUT_FILE = "chaos-run.out"
LAUNCH_SECONDS = 120.0
"""Seconds that a run may take to end after it was asked to; then it is killed."""


@dataclass
class Launched:
    """A run started by the trial."""

    process: asyncio.subprocess.Process
    url: str
    """URL of the broker itself, not of the proxy."""
    mark: str
    """Value of ``MARK_VARIABLE`` in the environment of the run's processes."""
    proxy: FaultProxy | None
    """Proxy between the run and its broker. None: the broker has several addresses or uses TLS."""
    is_private: bool
    """True if the broker is a private node started by this process."""

    async def stop(self) -> None:
        """End the run: drain it, and kill it if draining takes too long."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def settings(overrides: Sequence[str]) -> list[str]:
    """Return the settings of the run: the command line's overrides, defaults for the trial if they are not overridden,
    and a null broker URL, because the run gets the URL from its environment.
    """
    overridden = {word.partition("=")[0] for word in overrides}
    defaults = [word for word in RESTARTS if word.partition("=")[0] not in overridden]
    return [*overrides, *defaults, "broker.url=null", "broker.url_file=null"]


@contextlib.asynccontextmanager
async def launch_run(
    config: Config, words: Sequence[str], url: str | None, points: Path, tell: Callable[[str], None]
) -> AsyncIterator[Launched]:
    """Start a run, and end it on exit from the context.

    Args:
        config: The run's configuration, including :func:`settings`.
        words: Arguments of ``trinity-mq run``.
        url: URL of the broker. None: start a private node in the run's folder.
        points: Folder for arming points inside its agents.
        tell: Called with a line of text for a person.

    Raises:
        CommandError: The run is already running, or has finished.
        NodeError: The broker cannot be started.
    """
    folder = RunFolder(config)
    if (holder := folder.holder()) is not None:
        raise CommandError(f"run {config.name!r} is already running (process {holder}): --attach {folder.path}")
    if folder.finished:
        raise CommandError(f"run {config.name!r} has finished; give it another name (name=...), or --fresh")
    folder.logs.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        is_private = url is None
        if url is None:
            url = await stack.enter_async_context(private_broker(folder.broker, config.supervisor, tell))
        proxy = None
        if len(each(url)) == 1 and urlsplit(url).scheme == "amqp":
            proxy = await stack.enter_async_context(FaultProxy(url))
        mark = secrets.token_hex(8)
        output = stack.enter_context((folder.logs / OUTPUT_FILE).open("ab"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trinity_mq.cli.main", "run", *words, "--plain", "--attached",
            stdin=subprocess.PIPE,  # the run drains when this process ends, whatever the cause
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                MARK_VARIABLE: mark,
                POINTS_VARIABLE: str(points.absolute()),
                URL_VARIABLE: url if proxy is None else proxy.url,
            },
            start_new_session=True,  # Ctrl-C must reach only this process
        )  # fmt: skip
        run = Launched(process, url, mark, proxy, is_private)
        tell(f"run {config.name!r} in {folder.path}, its output in {folder.logs / OUTPUT_FILE}")
        try:
            yield run
        finally:
            await run.stop()


FOLDER = "chaos"
"""Subfolder of the run's folder for schedule and report."""
FURTHER_STEPS = 5
"""Number of train steps to wait for after the last fault, if the trial did not start the run or the run does not end by
itself."""
POINTS_FOLDER = "points"
"""Subfolder for armed points inside agents."""
INSIDE_SHARE = 0.5
"""Share of the faults at points inside agents, in mode ``serve``."""
RESTART_SECONDS = 10.0
"""Maximum seconds for publishing the request to restart an agent."""
END_SECONDS = 90.0
"""Maximum seconds between the explorer's last heartbeat and the end of the run's own process."""
DRAINED = (0, 128 + signal.SIGTERM)
"""Exit codes of a run that was asked to end."""

Tell = Callable[[str], None]


async def try_new_run(arguments: argparse.Namespace, tell: Tell) -> tuple[TrialOutcome, Path]:
    """Start the run of TARGET, inject faults, and wait for the run's end, or stop it after the further train steps or a
    failed recovery. Return the outcome and the folder for the report.

    Args:
        arguments: Arguments of ``trinity-mq chaos``.
        tell: Called with a line of text for a person.

    Raises:
        CommandError: The run cannot be started, or does not make train steps.
        NodeError: Its broker cannot be started.
    """
    if load_target_stages(arguments):
        raise CommandError(f"{arguments.target} describes several runs: give the file of one stage")
    addresses = Addresses.of(load_target_configuration(arguments).broker)
    url = arguments.broker or (None if addresses is None else addresses.text())
    arguments.overrides = settings(arguments.overrides)
    config = load_target_configuration(arguments)
    if arguments.fresh:
        for line in await asyncio.to_thread(discard_earlier_run, config, RunFolder(config)):
            tell(line)
    words = [arguments.target, *arguments.overrides]
    marks = ArmedPoints(config.path / FOLDER / POINTS_FOLDER)
    async with launch_run(config, words, url, marks.folder, tell) as run:
        broker = config.broker.model_copy(update={"url": run.url, "url_file": None})
        async with connect_bus(config.name, broker, "chaos") as (bus, topology):
            targets = _local_targets(config, run.process.pid, bus, topology, run)
            serves = config.mode == "serve"  # a serving run does not end by itself
            further = FURTHER_STEPS if serves else None
            plan = _plan(arguments, targets, config, config.path / FOLDER, tell, further, marks=marks)
            weights = _kept_weights(config)
            ended = asyncio.create_task(run.process.wait(), name="the run's end")
            try:
                outcome = await run_trial(bus, topology, targets, plan, ended=ended.done, tell=tell, weights=weights)
                reached_end = outcome.over
                if reached_end:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(END_SECONDS):
                            await asyncio.shield(ended)
                await run.stop()
            finally:
                ended.cancel()
            outcome.over = True
            await judge(
                bus,
                topology,
                config,
                outcome,
                run_dir=config.path,
                targets=targets,
                weights=weights,
                store=open_store(broker, config.name),
                code=None if run.process.returncode in DRAINED and not reached_end else run.process.returncode,
            )
            targets.end_left_over()
    return outcome, config.path / FOLDER


async def try_local_run(arguments: argparse.Namespace, tell: Tell) -> tuple[TrialOutcome, Path]:
    """Inject faults into a run that is running on this machine, and leave it running. Return value and errors as for
    :func:`try_new_run`.
    """
    config = load_target_configuration(arguments)
    folder = RunFolder(config)
    supervisor = folder.holder()
    if supervisor is None:
        raise CommandError(f"{folder.path} is not a running run; give its YAML file instead of --attach to start it")
    target = find_target(arguments)
    async with open_bus(target, "chaos") as (bus, topology):
        targets = _local_targets(config, supervisor, bus, topology)
        budget = config.supervisor.max_restarts, config.supervisor.restart_window
        plan = _plan(arguments, targets, config, config.path / FOLDER, tell, FURTHER_STEPS, budget)
        weights = _kept_weights(config)
        outcome = await run_trial(
            bus, topology, targets, plan, ended=lambda: folder.holder() != supervisor, tell=tell, weights=weights
        )
    # a private broker ends with its run, and is restarted for reading
    async with open_bus(find_target(arguments), "chaos") as (bus, topology):
        store = open_store(target.broker, target.run)
        await judge(bus, topology, config, outcome, run_dir=config.path, targets=targets, weights=weights, store=store)
    return outcome, config.path / FOLDER


async def elsewhere(arguments: argparse.Namespace, targets: FaultTargets, tell: Tell) -> tuple[TrialOutcome, Path]:
    """Inject faults into a run in containers or pods, and leave it running. Return value and errors as for
    :func:`try_new_run`.
    """
    config, target = load_target_configuration(arguments), find_target(arguments)
    folder = Path(f"{FOLDER}-{config.name}")
    async with open_bus(target, "chaos") as (bus, topology):
        plan = _plan(arguments, targets, config, folder, tell, FURTHER_STEPS)
        outcome = await run_trial(bus, topology, targets, plan, ended=lambda: False, tell=tell)
        store = open_store(target.broker, target.run)
        await judge(bus, topology, config, outcome, run_dir=None, targets=targets, store=store)
    return outcome, folder


def _kept_weights(config: Config) -> WeightArchive:
    return WeightArchive(config.path / "checkpoints", config.path / FOLDER / "weights")


def _local_targets(
    config: Config, supervisor: int, bus: Bus, topology: Topology, run: Launched | None = None
) -> LocalTargets:
    """Return access to the processes of a run on this machine; ``run`` is set if this trial started it."""
    if run is not None:
        broker_parent = os.getpid() if run.is_private else None
    else:
        broker_parent = supervisor if Addresses.of(config.broker) is None else None
    return LocalTargets(
        config.path.absolute(),
        supervisor,
        restart=_restart_function(bus, topology),
        mark=None if run is None else run.mark,
        proxy=None if run is None else run.proxy,
        broker_parent=broker_parent,
    )


def _restart_function(bus: Bus, topology: Topology) -> Callable[[str], Awaitable[None]]:
    """Return a function that asks the supervisor of the agent with a given id for a new process of this agent."""

    async def restart(agent: str) -> None:
        event = envelope(ControlEvent(verb="restart", target=agent, reason="trinity-mq chaos"))
        try:
            await bus.publish(topology.exchange("control"), f"restart.{agent}", event, timeout=RESTART_SECONDS)
        except BusUnavailable as error:
            raise CommandError(f"{agent} could not be asked to restart: {error}") from error

    return restart


def possible_faults(targets: FaultTargets, config: Config) -> dict[str, Sequence[str]]:
    """Return the possible kinds of faults of each role that the run has."""
    roles = {*config.agent_counts, "broker", *(["engine"] if "explorer" in config.agent_counts else [])}
    return {role: kinds for role, kinds in targets.possible.items() if role in roles}


def _plan(
    arguments: argparse.Namespace,
    targets: FaultTargets,
    config: Config,
    folder: Path,
    tell: Tell,
    further: int | None = None,
    budget: tuple[int, float] | None = None,
    marks: ArmedPoints | None = None,
) -> Plan:
    """Return the plan of a trial, and write its schedule into ``folder``.

    Raises:
        CommandError: None of the requested faults is possible here, or the schedule cannot be read.
    """
    possible = {
        role: [kind for kind in kinds if kind in arguments.kinds]
        for role, kinds in possible_faults(targets, config).items()
        if role in arguments.roles
    }
    if not any(possible.values()):
        raise CommandError(
            f"none of --kinds {','.join(arguments.kinds)} can be done to --roles {','.join(arguments.roles)} in "
            f"{targets.where}"
        )
    if arguments.schedule is None:
        share = arguments.inside if arguments.inside is not None else INSIDE_SHARE * (config.mode == "serve")
        schedule = draw(arguments.seed, arguments.kills, possible, arguments.every, 0.0 if marks is None else share)
    else:
        read = load(arguments.schedule)
        faults = [fault for fault in read.faults if fault.kind in possible.get(fault.role, ())]
        if len(faults) < len(read.faults):
            tell(
                f"{len(read.faults) - len(faults)} faults of {arguments.schedule} cannot be done in {targets.where}, "
                "and are left out"
            )
        schedule = ChaosSchedule(faults, read.seed, read.drawn_from)
    folder.mkdir(parents=True, exist_ok=True)
    save(schedule, folder / "schedule.json")
    return Plan(
        schedule=schedule,
        timeout=arguments.timeout,
        after=arguments.after,
        further=arguments.further if arguments.further is not None else further,
        budget=budget,
        marks=marks,
        clients=clients_of(config, schedule.seed or 0, arguments.clients, tell) if targets.is_local else None,
    )
