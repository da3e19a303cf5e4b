"""The table of checks: facts and needs in, findings out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.engines import ENGINES
from trinity_mq.messages import mixture, release_conflicts, releases_line
from trinity_mq.operations.doctor.facts import DoctorFacts, Needs
from trinity_mq.runtime.gpus import GpuReport
from trinity_mq.runtime.placement import PlacementError, place_run

Verdict = Literal["ok", "warning", "problem", "not looked at"]
Judgement = tuple[Verdict, str, str]
"""Verdict, observed value and advice. For ``not looked at``: the reason, and how to check manually."""
Judge = Callable[[DoctorFacts, Needs], Sequence[Judgement]]

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
OLDEST, NEWEST = (3, 10), (4, 99)
TIMEOUT_PER_QUEUE = (3, 12)
"""First release with consumer timeouts for individual queues."""
FLAGS = ("quorum_queue", "stream_queue")
CLOCK_SECONDS = 5.0
"""Maximum clock difference in seconds. Runs do not compare the clocks of two machines, but readers of logs do."""
LEAST_FREE, ENOUGH_FREE = 512 * 2**20, 5 * 2**30
"""Free bytes on the run folder's disk below which a checkpoint is likely to fail, and below which it may fail."""
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""First driver branch for each major release of CUDA, by NVIDIA's table of minor version compatibility."""
STATUS = "`rabbitmqctl status` on the broker's machine"
ENVIRONMENT = "`rabbitmqctl environment` on the broker's machine"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One finding of a check, which may have several."""

    subject: str
    verdict: Verdict
    seen: str
    wanted: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One row of the table."""

    subject: str
    wanted: str
    """The expectation: a format string with the fields ``hold``, ``message_size`` and ``stream_size``."""
    judge: Judge
    facts: tuple[str, ...]
    """Names of the facts that the check needs."""
    by_hand: str
    """Instructions for a manual check if the facts are missing."""
    of_run: bool
    """True if the check applies only to a named run."""


BROKER_CHECKS: list[DoctorCheck] = []
MACHINE_CHECKS: list[DoctorCheck] = []


def check(
    subject: str, wanted: str, *facts: str, by_hand: str = "", of_run: bool = False, of_machine: bool = False
) -> Callable[[Judge], Judge]:
    """Add a row to the table of broker checks or machine checks; see :class:`DoctorCheck`."""

    def add(judge: Judge) -> Judge:
        table = MACHINE_CHECKS if of_machine else BROKER_CHECKS
        table.append(DoctorCheck(subject, wanted, judge, facts, by_hand, of_run))
        return judge

    return add


def findings(checks: Sequence[DoctorCheck], facts: DoctorFacts, needs: Needs) -> Iterator[DoctorFinding]:
    """Yield the findings of each check, at least one per check."""
    broker = needs.config.broker
    sizes = {"message_size": size(broker.max_message_bytes), "stream_size": size(needs.stream_bytes)}
    for row in checks:
        for verdict, seen, do in _judgements(row, facts, needs):
            if verdict == "not looked at":
                yield DoctorFinding(row.subject, verdict, seen, do=f"to look: {do}")
            else:
                wanted = row.wanted.format(hold=f"{needs.hold_seconds:g} s", **sizes)
                yield DoctorFinding(row.subject, verdict, seen, wanted, do)


def _judgements(row: DoctorCheck, facts: DoctorFacts, needs: Needs) -> Sequence[Judgement]:
    if row.of_run and needs.topology is None:
        return [("not looked at", "no run is named", "name the run: `trinity-mq doctor TARGET`")]
    if unknown := [name for name in row.facts if name not in facts]:
        return [("not looked at", facts.why(unknown[0]), row.by_hand)]
    try:
        return row.judge(facts, needs)
    except (KeyError, TypeError, AttributeError) as error:
        return [("not looked at", f"the broker's answer has an unexpected form ({error!r})", row.by_hand)]


def first(seen: str, *rows: tuple[Verdict, object, str]) -> list[Judgement]:
    """Return one judgement on ``seen``: verdict and advice of the first row (verdict, condition, advice) with a true
    condition, else ``ok``.
    """
    return [next(((verdict, seen, do) for verdict, applies, do in rows if applies), ("ok", seen, ""))]


def size(count: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(1536 * 1024)
    '1.5 MiB'
    """
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} {units[0]}" if count >= 100 or count == int(count) else f"{count:.1f} {units[0]}"


# -- the broker


@check("connection", "TLS that verifies, unless the broker is on this machine")
def _connection(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    clear = [urlsplit(url).hostname or "" for url in facts["urls"] if urlsplit(url).scheme == "amqp"]
    remote = [host for host in clear if host not in LOOPBACK]
    if clear:
        seen = f"to {', '.join(remote)} unencrypted, including the password" if remote else "on this machine"
        encrypt = "write amqps:// and give the broker a certificate, or make sure that nobody can read the traffic"
        return first(seen, ("warning", remote, encrypt))
    seen = "TLS, verified" if facts["tls_verified"] else "TLS without verification: any server can pose as the broker"
    verify = "remove broker.tls.verify: false, and set broker.tls.ca_file"
    return first(seen, ("warning", not facts["tls_verified"], verify))


def _release(facts: DoctorFacts) -> tuple[int, int] | None:
    """Return the broker's release; None if it is not RabbitMQ or does not report its version."""
    server = facts["server"]
    numbers = re.match(r"(\d+)\.(\d+)", str(server.get("version"))) if server.get("product") == "RabbitMQ" else None
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


@check("version", "RabbitMQ 3.10 to 4.x", "server")
def _version(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    product, seen = facts["server"].get("product", "unknown"), facts["server"].get("version")
    known_release = _release(facts)
    release = known_release or OLDEST
    return first(
        f"{product} {seen}",
        ("warning", known_release is None, "use RabbitMQ: runs need its quorum queues and streams"),
        ("problem", release < OLDEST, "upgrade the broker"),
        ("warning", release > NEWEST, "read its list of breaking changes: this system was not tested with it"),
    )


@check("consumer timeout", "more than {hold}, the longest that an agent holds a message")
def _consumer_timeout(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    if "server" in facts and (_release(facts) or OLDEST) >= TIMEOUT_PER_QUEUE:
        return first(f"{needs.config.broker.consumer_timeout:g} s, which the run's queues ask for themselves")
    if "limits" not in facts:
        return [("not looked at", facts.why("limits"), ENVIRONMENT)]
    seconds = facts["limits"]["consumer_timeout"] / 1000
    raise_it = (
        f"add the line `consumer_timeout = {round(needs.config.broker.consumer_timeout * 1000)}` to rabbitmq.conf "
        "(milliseconds; 1800000 is RabbitMQ's own) and restart the broker: a message that is held longer is "
        "redelivered and processed again, without end"
    )
    low = 0 < seconds <= needs.hold_seconds
    return first(f"{seconds:g} s" if seconds else "no limit", ("problem" if needs.exact else "warning", low, raise_it))


@check("message size", "at least broker.max_message_bytes, {message_size}", "limits", by_hand=ENVIRONMENT)
def _message_size(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    limit = facts["limits"]["max_message_size"]
    if not limit:
        return [("not looked at", "the broker does not report it", ENVIRONMENT)]
    lower = (
        f"set broker.max_message_bytes to {limit} or less, or raise max_message_size in rabbitmq.conf: "
        "one larger message closes the channel for all other messages"
    )
    return first(size(limit), ("problem", limit < needs.config.broker.max_message_bytes, lower))


@check("alarms", "none", "nodes", by_hand=STATUS)
def _alarms(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    alarm_kinds = (
        ("mem_alarm", "memory", "free memory or raise vm_memory_high_watermark"),
        ("disk_free_alarm", "disk", "free space or lower disk_free_limit"),
    )
    raised: list[Judgement] = []
    for node in facts["nodes"]:
        alarms = [(alarm, do) for key, alarm, do in alarm_kinds if node.get(key)]
        alarms += [(alarm, "see `rabbitmqctl status`") for alarm in node.get("other_alarms", ())]
        raised += [
            ("problem", f"{alarm} ({node['name']}) alarm: the broker blocks publishers", do) for alarm, do in alarms
        ]
    return raised or first("none")


@check("broker's disk", "{stream_size} for the run's streams above that", "nodes", by_hand=STATUS)
def _broker_disk(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    judgements: list[Judgement] = []
    less = "free space there, or lower broker.ready_max_bytes and broker.results_max_bytes"
    for node in facts["nodes"]:
        free, limit = node.get("disk_free"), node.get("disk_free_limit")
        # both values are unknown until the node has measured its disk
        if isinstance(free, int) and isinstance(limit, int):
            judgements += first(
                f"{size(free)} free on {node['name']}, of which {size(limit)} must stay free (disk_free_limit)",
                ("problem", free < limit, f"{less} or disk_free_limit: publishing is blocked"),
                ("warning", free - limit < needs.stream_bytes, less),
            )
    return judgements or [("not looked at", "the node has not measured its disk yet", STATUS)]


@check(
    "permissions",
    "configure, write and read for all names of the run",
    "permissions",
    by_hand="compare `rabbitmqctl list_permissions -p VHOST` on the broker's machine with `trinity-mq broker "
    "permissions RUN`, or give --management with an administrator's user and password",
    of_run=True,
)
def _permissions(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    patterns: Mapping[str, str] = {name: facts["permissions"][name] for name in ("configure", "write", "read")}
    names = names_of(needs.named)
    lacking = [operation for operation, pattern in patterns.items() if not all(allows(pattern, name) for name in names)]
    seen = f"configure, write, read: {' '.join(map(repr, patterns.values()))}"
    seen = f"{', '.join(lacking)} not for all names of the run ({seen})" if lacking else seen
    command = "; ".join(rabbitmqctl_lines(facts["user"], facts["vhost"], permissions(needs.named.run, "agent")))
    return first(seen, ("problem", lacking, command))


def queues_of(topology: Topology) -> list[Queue]:
    """Return one queue of each kind of a run."""
    return [*topology.durable, topology.batch_queue(0, "0" * 32), topology.listener("runner-0", "0", "control")]


def names_of(topology: Topology) -> list[str]:
    """Return one broker name of each kind of a run."""
    return [*topology.exchanges, *(queue.name for queue in queues_of(topology)), topology.lock("trainer")]


def allows(pattern: str, name: str) -> bool:
    """Return whether RabbitMQ's pattern matches a name. It may match anywhere in the name. An empty pattern matches
    nothing; a pattern that Python cannot parse counts as a match.
    """
    return bool(pattern) and (not _is_readable(pattern) or re.search(pattern, name) is not None)


def _is_readable(pattern: str) -> bool:
    """Return whether Python can parse an Erlang pattern. Patterns that Python cannot parse are not used for
    verdicts.
    """
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


LIST_FLAGS = "`rabbitmqctl list_feature_flags` on the broker's machine"


@check("feature flags", ", ".join(FLAGS), "feature_flags", by_hand=LIST_FLAGS)
def _feature_flags(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    # a flag that is not listed is a fixed part of that version
    off = [flag["name"] for flag in facts["feature_flags"] if flag["name"] in FLAGS and flag["state"] != "enabled"]
    enable = "rabbitmqctl enable_feature_flag all, once all nodes of the cluster have the new version"
    return first(f"{', '.join(off)} disabled" if off else "enabled", ("problem", off, enable))


@check("clock", "less than 5 s between the broker's and ours", "clock", by_hand="`date -u` on both machines")
def _clock(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    ahead, error = facts["clock"]
    seen = f"the broker's is {abs(ahead):.1f} s {'ahead' if ahead >= 0 else 'behind'} (± {error:.1f} s)"
    sync = (
        "set both by NTP: runs continue, but times in logs and metrics do not match, and certificates may seem invalid"
    )
    return first(seen, ("warning", abs(ahead) - error > CLOCK_SECONDS, sync))


def _depths(facts: DoctorFacts, needs: Needs) -> dict[str, tuple[int, int]]:
    """Return (messages, consumers) of each known queue of the run, by name. Where AMQP has answered, only ready
    messages are counted.
    """
    listed = {
        queue["name"]: (queue.get("messages", 0), queue.get("consumers", 0))
        for queue in facts.get("queues", ())
        if queue["name"].startswith(needs.named.prefix)
    }
    return {**listed, **facts.get("depths", {})}


@check("queues of the run", "queues of a running or resumable run, or none", of_run=True)
def _run_queues(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    depths = _depths(facts, needs)
    if not depths:
        return first("none")
    filled = ", ".join(f"{name} {count}" for name, (count, _) in sorted(depths.items()) if count)
    unused, finished = not any(consumers for _, consumers in depths.values()), needs.folder_finished
    use = "in use" if not unused else "of a resumable run" if finished is False else "not in use"
    clean = f"`trinity-mq broker clean {needs.named.run}` deletes them"
    fresh = f"a new run of this name would receive the old run's tasks: {clean}, unless the old run is to be resumed"
    return first(
        f"{len(depths)} queues{f' ({filled})' if filled else ''}, {use}",
        ("warning", unused and finished, f"the run's folder says that it is over: {clean}"),
        ("warning", unused and finished is None, fresh),
    )


@check("releases", "agents of one release, or of several releases during an upgrade", of_run=True)
def _releases(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    mixed = mixture(beat for beat in facts.get("beats", {}).values() if not beat.has_ended)
    if "beats" not in facts and any(consumers for _, consumers in _depths(facts, needs).values()):
        return [("not looked at", facts.why("beats"), f"`trinity-mq status {needs.named.run}`")]
    if not mixed:
        return first("no agent is running")
    end = "upgrade the other agents too, or roll back: docs/upgrading.md"
    conflict_texts = release_conflicts(mixed)
    return first(
        " ".join([releases_line(mixed), *conflict_texts]),
        (
            "problem",
            conflict_texts,
            "first upgrade the agents named above; incompatible agents take no work until then",
        ),
        ("warning", len(mixed) > 1, end),
    )


@check("dead letters", "none", of_run=True)
def _dead_letters(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    count, _ = _depths(facts, needs).get(needs.named.dead.name, (0, 0))
    why = f"`trinity-mq dead list {needs.named.run}` says why"
    return first(str(count) if count else "none", ("warning", count, why))


ALL = ("quorum", "stream", "exclusive")
LOSSES = {
    "message-ttl": (("quorum", "exclusive"), "messages that wait longer are dropped or dead-lettered"),
    "max-length": (ALL, "messages above it are dropped or refused"),
    "max-length-bytes": (ALL, "messages above it are dropped or refused"),
    "max-age": (("stream",), "older results and processed batches are dropped before they are read"),
    "expires": (("quorum", "exclusive"), "queues that are not used for that long are deleted with what is in them"),
}
"""Policy settings that lose messages: the kinds of queues that they affect, and the harm."""
POLICY_KINDS = {"policies": "policy", "operator_policies": "operator_policy"}
APPLY_TO = {"quorum": "quorum_queues", "stream": "streams", "exclusive": "classic_queues"}
NO_POLICY = "no policy that removes messages or queues of the run"
LIST_POLICIES = "`rabbitmqctl list_policies -p VHOST` and `rabbitmqctl list_operator_policies -p VHOST` on its machine"


@check("policies", NO_POLICY, *POLICY_KINDS, by_hand=LIST_POLICIES, of_run=True)
def _policies(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    judgements: list[Judgement] = []
    targets: list[Queue | str] = [*queues_of(needs.named), *needs.named.exchanges]
    harmed: dict[tuple[str, str], tuple[Verdict, str, list[str]]] = {}
    for kind, singular in POLICY_KINDS.items():
        if unread := [policy["name"] for policy in facts[kind] if not _is_readable(policy["pattern"])]:
            why = f"the pattern of {', '.join(unread)} is not a regular expression that Python can read"
            judgements.append(("not looked at", why, f"compare it by eye with {needs.named.prefix}*"))
        for target in targets:
            matching = [policy for policy in facts[kind] if policy["name"] not in unread and _applies(policy, target)]
            # only the policy with the highest priority takes effect
            for policy in sorted(matching, key=lambda policy: -policy["priority"])[:1]:
                for key, value in policy["definition"].items():
                    if (harm := _harm(key, value, target, needs)) is not None:
                        about = f"{singular.replace('_', ' ')} {policy['name']!r} (pattern {policy['pattern']!r})"
                        clear = f"`rabbitmqctl clear_{singular} -p {facts['vhost']} {policy['name']}`"
                        row = harmed.setdefault((f"{about} sets {key}: {value}", clear), (*harm, []))
                        row[-1].append(target if isinstance(target, str) else target.name)
    for (sets, clear), (verdict, words, names) in harmed.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        do = f"change its pattern so that it does not match {needs.named.prefix}*, or {clear}"
        judgements.append((verdict, f"{sets} on {shown}: {words}", do))
    return (
        judgements if harmed else [*judgements, *first("no policy conflicts with the queues and exchanges of the run")]
    )


def _applies(policy: Mapping[str, Any], target: Queue | str) -> bool:
    """Return whether a policy applies to a queue, or to an exchange name."""
    if isinstance(target, str):
        return policy["apply-to"] in {"all", "exchanges"} and allows(policy["pattern"], target)
    return policy["apply-to"] in {"all", "queues", APPLY_TO[target.kind]} and allows(policy["pattern"], target.name)


def _harm(key: str, value: Any, queue: Queue | str, needs: Needs) -> tuple[Verdict, str] | None:
    """Return the harm that a setting does to a queue or exchange of the run; None: no harm."""
    if isinstance(queue, str):
        words = "messages without a queue go there instead of being returned to the publisher"
        return ("warning", words) if key == "alternate-exchange" else None
    limit = needs.config.broker.delivery_limit
    if key == "delivery-limit" and queue.kind == "quorum" and value < 0:
        return "problem", "RabbitMQ 3.10 drops messages at the first redelivery then"
    if key == "delivery-limit" and queue.kind == "quorum" and value <= limit:
        setting = f"broker.delivery_limit ({limit})"
        return "problem", f"the broker dead-letters a task before our own {setting} ends it with an outcome"
    if key == "consumer-timeout" and value / 1000 <= needs.hold_seconds:
        return "problem", f"agents hold messages for up to {needs.hold_seconds:g} s"
    kinds, words = LOSSES.get(key, ((), ""))
    declared = {"max-length-bytes": queue.max_length_bytes, "expires": queue.expires_ms}.get(key)
    if queue.kind not in kinds or (declared is not None and value >= declared):
        return None  # the lower value of policy and declaration takes effect
    return "warning" if queue.kind == "exclusive" else "problem", words


# -- this machine


def _engine_packages(engine: str, facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    packages = [f"{name} {release}" for name, release in facts[engine].items()]
    wanted, refusal = needs.engine == engine, facts.get(f"{engine}_refusal", "")
    return first(
        ", ".join(packages) or "not installed",
        ("problem", wanted and not packages, f"pip install 'trinity-mq[{engine}]'"),
        ("problem" if wanted else "warning", packages and refusal, refusal),
    )


for _engine in (name for name, row in ENGINES.items() if row.packages):
    check(f"extra {_engine}", f"for the {_engine} engine, if that is used", of_machine=True)(
        partial(_engine_packages, _engine)
    )


@check("torch", "torch 2.8 or newer", of_machine=True)
def _torch(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    failed = isinstance(facts["torch"], str)
    again = "install it again: `pip install 'torch>=2.8'`, from the index for your GPU or CPU"
    if failed:
        return [("problem", facts["torch"], again)]
    return first(f"{facts['torch']['torch']}, {_build(facts['torch'])}")


def _build(report: Mapping[str, Any]) -> str:
    return "without CUDA" if report["cuda"] is None else f"CUDA {report['cuda']}"


@check("GPU driver", "a driver for the CUDA version of torch", of_machine=True)
def _driver(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    report, driver = facts["torch"], facts["driver"]
    if isinstance(report, str):
        return [("not looked at", "torch cannot be queried", "`nvidia-smi`")]
    if driver is None:
        missing = "install the NVIDIA driver; in a container, use the NVIDIA container runtime"
        return first("none", ("warning", facts["has_gpu_devices"], missing))
    oldest = OLDEST_DRIVERS.get(int((report["cuda"] or "0").partition(".")[0]), 0)
    do = f"install driver {oldest} or newer, or the torch of an older CUDA release"
    return first(f"{driver}, torch has {_build(report)}", ("problem", int(driver.partition(".")[0]) < oldest, do))


@check(
    "C compiler", "a C compiler and Python's headers, which Triton needs on a GPU (vLLM, packed rows)", of_machine=True
)
def _compiler(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    report, headers = facts["torch"], facts["python_headers"]
    has_gpu = not isinstance(report, str) and report["available"]
    seen = f"{facts['compiler'] or 'none'}, {'with' if headers else 'without'} Python.h"
    do = "`apt-get install gcc libc6-dev python3-dev` (the headers of this Python), or set CC to a compiler"
    return first(seen, ("problem", has_gpu and not (facts["compiler"] and headers), do))


@check("GPU", "a GPU for large models, with most of its memory free", of_machine=True)
def _gpus(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    report = facts["torch"]
    if isinstance(report, str):
        return [("not looked at", "torch cannot be queried", "`nvidia-smi`")]
    judgements: list[Judgement] = []
    for number, (name, free, total) in enumerate(report.get("gpus", ())):
        seen = f"{number}: {name}, {size(free)} of {size(total)} free"
        judgements += first(seen, ("warning", free <= total / 2, "`nvidia-smi` shows the processes that use it"))
    if report["available"]:
        return judgements
    why = "torch is built without CUDA" if report["cuda"] is None else f"torch needs CUDA {report['cuda']}"
    unseen = f"the machine has a GPU that torch does not see: {why}"
    seen = unseen if facts["has_gpu_devices"] else "none: everything runs on the CPU"
    do = (
        "install the torch for your driver (see `nvidia-smi`); in a service or container, give it access to the devices"
    )
    return first(seen, ("warning", facts["has_gpu_devices"], do))


@check("GPUs of the run", "a GPU for each process of the run that computes on GPUs", of_machine=True)
def _gpu_count(facts: DoctorFacts, needs: Needs) -> list[Judgement]:
    report: GpuReport = facts["gpus"]
    if not needs.exact:
        return [("not looked at", "no configuration is named", "give CONFIG")]
    try:
        placement = place_run(needs.config, report.gpus)
    except PlacementError as error:
        plan = "`trinity-mq plan CONFIG` shows the GPU of each process"
        return [("problem", str(error), plan)]
    missing = needs.config.model.device == "cuda" and not report.gpus
    return first(str(placement), ("problem", missing, f"model.device is cuda: {report.why or 'no GPU is visible'}"))


ROOM = "5 GiB for checkpoints and logs, and room for two checkpoints"


@check("run folder's disk", ROOM, of_machine=True)
def _folder_disk(facts: DoctorFacts, _needs: Needs) -> list[Judgement]:
    free, last = facts["folder_free"], facts["checkpoint_bytes"]
    do = "free space there, or set run_dir to a folder on a larger disk"
    if not facts["folder_is_writable"]:
        return [("problem", f"{facts['folder']} cannot be written", "work in another folder, or set run_dir")]
    return first(
        f"{size(free)} free in {facts['folder']}" + (f"; the last checkpoint has {size(last)}" if last else ""),
        ("problem", free < max(LEAST_FREE, last), do),
        ("warning", free < max(ENOUGH_FREE, 2 * last), do),
    )
