"""A run on several machines. Each machine runs :func:`run_node` with the same lists of hosts, and starts its part."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_mq.bus.addresses import Addresses
from trinity_mq.config import Config
from trinity_mq.errors import CommandError
from trinity_mq.launch.session import agents
from trinity_mq.runtime.processes.supervisor import ProcessEvent, ProcessSpec, Supervisor
from trinity_mq.targets.target import name_of_host


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """The hosts of a run. A host may be in both lists."""

    trainers: tuple[str, ...]
    """Hosts of the trainer's processes, ``trainer.nproc`` on each. Rank 0 runs on the first."""
    engines: tuple[str, ...] = ()
    """Hosts with ``explorer.rollout_model.engine_num`` engines each. The first also runs all agents except the trainer.
    Empty: the engines and these agents are started in another way."""
    port: int = 29400
    """Port of torchrun's rendezvous on the first trainer host."""

    def problem(self, host: str) -> str:
        """Return the problem with this layout on ``host``: a repeated host, engine hosts with the same agent name, or
        that ``host`` is not in the layout. Empty: no problem.
        """
        for name, hosts in (("--trainers", self.trainers), ("--engines", self.engines)):
            if repeated := [entry for entry in hosts if hosts.count(entry) > 1]:
                return f"{name} names {repeated[0]!r} twice: name each host once"
        names = [engine_host_name(entry) for entry in self.engines]
        if same := [entry for entry in self.engines if names.count(engine_host_name(entry)) > 1]:
            return (
                f"--engines names {same[0]!r} and {same[1]!r}, whose agents would both be called "
                f"{engine_host_name(same[0])}: name one of the hosts by another address"
            )
        if host in {*self.trainers, *self.engines}:
            return ""
        hosts_text = ", ".join(dict.fromkeys((*self.trainers, *self.engines)))
        return f"this host is {host!r}, and the run has the hosts {hosts_text}: name this host with --host"


def engine_host_name(host: str) -> str:
    """Return the name of the agent that runs only engines on a host."""
    return f"engines-{name_of_host(host)}"


def node_processes(config: Config, target: Sequence[str], layout: NodeLayout, host: str) -> list[ProcessSpec]:
    """Return the processes of one host.

    Args:
        config: Configuration of the run.
        target: Words of the command line that name the configuration and its overrides.
        layout: The hosts of the run.
        host: Address of this host. The other hosts must be able to reach it.
    """
    file, *overrides = target
    every = agents(config, Path(file), None)  # each agent places itself among the GPUs of its machine
    specs = []
    for spec in every:
        if spec.role == "trainer":
            if host in layout.trainers:
                address = f"synchronizer.host={layout.trainers[0]}"
                specs.append(_trainer(replace(spec, argv=(*spec.argv, *overrides, address)), config, layout, host))
        elif layout.engines[:1] == (host,):
            address = f"explorer.rollout_model.host={host}"
            specs.append(replace(spec, argv=(*spec.argv, *overrides, address)))
    if host in layout.engines[1:]:
        name = engine_host_name(host)
        words = ("explorer", file, *overrides, f"explorer.rollout_model.host={host}", "--engines-only", "--id", name)
        argv = (sys.executable, "-m", "trinity_mq.cli.main", *words)
        explorer = next((spec for spec in every if spec.role == "explorer"), every[0])
        specs.append(ProcessSpec(name=name, role="engine", argv=argv, env=explorer.env))
    return specs


def _trainer(spec: ProcessSpec, config: Config, layout: NodeLayout, host: str) -> ProcessSpec:
    """Return the trainer's process on ``host``: torchrun with the trainer's command, if there are several hosts.

    The ranks of torchrun's static rendezvous follow the list of hosts. Torchrun does not restart its ranks by itself:
    this supervisor restarts torchrun, so that the ranks of all hosts meet at a new store.
    """
    if len(layout.trainers) == 1:
        return spec
    python, _, module, *words = spec.argv
    options = {
        "nnodes": len(layout.trainers),
        "nproc-per-node": config.trainer.nproc,
        "node-rank": layout.trainers.index(host),
        "master-addr": layout.trainers[0],
        "master-port": layout.port,
        "max-restarts": 0,
    }
    torchrun = [f"--{name}={value}" for name, value in options.items()]
    argv = (python, "-m", "trinity_mq.launch.torchrun", str(config.path), *torchrun, "-m", module, *words)
    return replace(spec, name=f"{spec.name}-node{layout.trainers.index(host)}", argv=argv)


async def run_node(
    config: Config, target: Sequence[str], layout: NodeLayout, host: str, report: Callable[[str], None]
) -> int:
    """Run this host's processes until the run is over, or until a signal drains them; return the highest exit code. A
    second signal kills them.

    Args:
        config: Configuration of the run.
        target: Words that name the configuration and its overrides, as for :func:`node_processes`.
        layout: The hosts of the run.
        host: Address of this host.
        report: Called with lines for a person.

    Raises:
        CommandError: The run cannot work on several machines, or this host has no part in it.
    """
    if problem := layout.problem(host):
        raise CommandError(problem)
    if Addresses.of(config.broker) is None:
        raise CommandError(
            "a run on several machines needs a broker that all of them can reach: set broker.url, or "
            "TRINITY_MQ_BROKER_URL on each machine"
        )

    def on_event(event: ProcessEvent) -> None:
        details = (event.output, event.reason, f"again in {event.delay:.1f} s" if event.what == "restarting" else "")
        code = "" if event.code is None else f" (exit code {event.code})"
        report(": ".join(filter(None, (f"{event.name} {event.what}{code}", *details))))

    specs = node_processes(config, target, layout, host)
    report(
        f"run {config.name!r}, host {host}: {', '.join(spec.name for spec in specs)}; output in {config.path / 'logs'}"
    )
    supervisor = Supervisor(specs, config=config.supervisor, log_dir=config.path / "logs", on_event=on_event)
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if drains:
            supervisor.kill()
        else:
            report("draining; interrupt again to kill at once")
            drains.append(loop.create_task(supervisor.drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await supervisor.run()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await asyncio.gather(*drains)
