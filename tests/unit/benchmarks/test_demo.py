"""What the benchmark of the demo makes of what it has seen."""

import pytest

from benchmarks.bench_demo import Look, Measured, processor_seconds, role_of, seen, table, verdicts


def run(system: str, seed: int, rate: float, **more: float) -> Measured:
    return Measured(system, seed, rate=rate, cpu=0.3, first=5.0, memory=900.0, accuracy=0.9, **more)


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("beam.smp", "/usr/lib/erlang/beam.smp -W w", "RabbitMQ"),
        ("python", "python -m trinity_mq.cli.main trainer config.yaml --id trainer-0", "trainer"),
        ("python", "python -m trinity_agents.engine.agent --config c.json", "engine"),
        ("python", "python -m trinity_mq.cli.main run config.yaml", "supervisor"),
    ],
)
def test_processes_have_the_role_of_their_command(name, command, role):
    assert role_of(name, command.split()) == role


def test_processor_time_between_two_looks_is_shared_out_evenly():
    looks = [Look(10.0, {"runner": 1.0}, 0.0), Look(20.0, {"runner": 3.0, "engine": 2.0}, 0.0)]
    assert processor_seconds(looks, 15.0) == {"runner": 2.0, "engine": 1.0}
    assert processor_seconds(looks, 25.0) == {"runner": 3.0, "engine": 2.0}, "after the last look: all of it"


def test_targets_are_judged_by_medians_and_only_with_who_was_measured():
    found = [run("trinity-mq", seed, rate, rollout=50.0, train=90.0) for seed, rate in enumerate((4.0, 6.0, 8.0))]
    found += [run("trl", 0, 5.0)]
    values = seen(found)
    assert values["steps/s of TRL's"] == pytest.approx(1.2)
    assert "steps/s of the bare loop's" not in values
    judged = {line.split(":")[0]: met for line, met in verdicts(values)}
    assert judged == {
        "steps/s of TRL's": True,
        "cpu s a step": False,
        "rollout, ms": False,
        "first step, s": True,
        "memory, MiB": True,
    }
    assert "| trl | 5.00 | 5.00 | 0.300 |  |  | 5.0 | 900 | 0.900 to 0.900 |" in table(found)
