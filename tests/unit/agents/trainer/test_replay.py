"""Groups that are trained on again: which, how often, and the same ones wherever the trainer is killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.agent import Trainer
from trinity_agents.trainer.history import lineage
from trinity_agents.trainer.loop import _consumed_tickets
from trinity_agents.trainer.sources.mix import MixSource, experts_per_step
from trinity_agents.trainer.sources.records import Records, RecordSource
from trinity_agents.trainer.sources.replay import ReplayIndex, ReplaySource, replayed_groups_per_step
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Topology
from trinity_mq.config import ExperienceBufferConfig, ReplayConfig, load_config
from trinity_mq.data.priorities import PriorityError
from trinity_mq.experience import Experience
from trinity_mq.runtime.plugins import add_plugins, resolve
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import find_checkpoints

SHARE = "buffer.trainer_input.replay.share=0.34"
UNCACHED = (
    "model.max_model_len=10002048",
    "model.max_response_tokens=10000000",
    "broker.ready_max_bytes=1000000000000",
)
"""Batches that may be larger than what the trainer keeps in memory: each group is read again."""
SETTINGS = (SHARE, "trainer.save_interval=3", "trainer.max_checkpoints_to_keep=50")


def index(**settings: Any) -> ReplayIndex:
    return ReplayIndex(ReplayConfig(share=0.5, **settings), seed=0)


def names(found: Sequence[Any]) -> list[str]:
    return [group.tid for group in found]


def test_the_newest_and_least_used_come_first_and_of_equals_the_oldest() -> None:
    known = index(cooldown=1, max_uses=9)
    for step in (1, 2, 3):
        known.add([f"{step}/a", f"{step}/b"], f"t{step}", [step], step)
    assert names(known.choose(3, 4)) == ["3/a", "3/b", "2/a"]
    known.use(known.choose(3, 4), 4)  # two steps older each
    assert names(known.choose(9, 5)) == ["2/b", "1/a", "1/b", "3/a", "3/b", "2/a"]


CLASS_FORM = """
from trinity_mq.data import PRIORITY_FUNC, PriorityFunction


@PRIORITY_FUNC.register_module("even_first")
class EvenFirst(PriorityFunction):
    def __init__(self, bonus: float, limit: int = 9):
        self.bonus, self.limit = bonus, limit

    def __call__(self, item):
        info = item[0].info
        even = self.bonus * (info["model_version"] % 2 == 0)
        return info["model_version"] + even - info["use_count"], info["use_count"] < self.limit

    @classmethod
    def default_config(cls):
        return {"bonus": 5.0, "limit": 3}
"""


@pytest.fixture
def even_first(tmp_path: Path, fresh_imports: None) -> ReplayConfig:
    (tmp_path / "priority_class_plugin.py").write_text(CLASS_FORM)
    add_plugins([str(tmp_path)])
    replay = {"share": 0.5, "priority_fn": "even_first", "max_uses": 9}
    settings = {"plugin_dirs": [str(tmp_path)], "model": {"model_path": "m"}}
    buffer = {"taskset": {"path": "x"}, "trainer_input": {"replay": replay}}
    return load_config({**settings, "buffer": buffer}).buffer.trainer_input.replay


def test_a_priority_in_class_form_decides_order_and_end(even_first: ReplayConfig) -> None:
    assert even_first.priority_fn == "priority_class_plugin.EvenFirst"
    known = ReplayIndex(even_first, seed=0)
    for step in (1, 2, 3, 4):
        known.add([str(step)], f"t{step}", [step], step)
    direct = resolve("priority", even_first.priority_fn)(bonus=5.0, limit=3)
    expected = {
        step: direct([SimpleNamespace(info={"model_version": step, "use_count": 1})])[0] for step in range(1, 5)
    }
    assert names(known.choose(4, 5)) == [str(step) for step in sorted(expected, key=expected.__getitem__)[::-1]]
    known.use(known.choose(2, 5), 5)
    known.use(known.choose(1, 6), 6)
    assert names(known.choose(4, 7)) == ["2", "3", "1"], "4 was used three times, its first time included"


def test_a_priority_in_class_form_that_gives_no_priority_is_one_error(even_first: ReplayConfig) -> None:
    with pytest.raises(PriorityError, match=r"EvenFirst cannot be made with .*\{'boost': 1\}: TypeError"):
        ReplayIndex(even_first.model_copy(update={"priority_fn_args": {"boost": 1}}), seed=0)
    known = ReplayIndex(even_first.model_copy(update={"priority_fn_args": {"bonus": "x"}}), seed=0)
    known.add(["a"], "t", [1], 1)
    with pytest.raises(PriorityError, match="EvenFirst raised TypeError"):
        known.choose(1, 2)


def test_uses_cooldown_and_age_are_bounded() -> None:
    known = index(cooldown=2, max_uses=2, max_age=5)
    known.add(["a"], "t", [7], 1)
    taken = []
    for step in range(2, 12):
        chosen = known.choose(1, step)
        known.use(chosen, step)
        known.add([], "none", [], step)
        taken += [step] * len(chosen)
    assert taken == [3, 5]
    assert (len(known), known.tickets) == (0, [])
    known = index(max_age=3, max_uses=99)
    known.add(["a"], "t", [7], 1)
    assert [bool(known.choose(1, step)) for step in (2, 3, 4, 5)] == [True, True, True, False]


def test_the_capacity_keeps_those_of_the_highest_priority() -> None:
    known = index(capacity=3)
    for step in (1, 2):
        known.add([f"{step}/a", f"{step}/b"], f"t{step}", [step], step)
    assert sorted(names(known.choose(9, 3))) == ["1/b", "2/a", "2/b"]
    known.add(["3/a", "3/b", "3/c"], "t3", [3], 3)
    assert known.tickets == ["t3"]


class Remembering(FakeLearner):
    """Notes the groups of each step: those of its batch, and others."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.fresh: dict[int, list[str]] = {}
        self.replayed: dict[int, list[str]] = {}
        self.trains: Callable[[int], None] = lambda batch: None

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        groups = Counter(one.eid.tid for one in experiences)
        assert set(groups.values()) == {2}, "whole groups"
        newest = max(one.eid.batch for one in experiences)
        self.trains(newest)
        fresh = [tid for tid in groups if tid.startswith(f"{newest}/")]
        replayed = [tid for tid in groups if not tid.startswith(f"{newest}/")]
        assert self.fresh.setdefault(step_number, fresh) == fresh
        assert self.replayed.setdefault(step_number, replayed) == replayed, "a step made again has the same ones"
        return await super().step(experiences, step_number)


def trim(sim: Simulation, batch: int) -> None:
    """Remove what the ready stream holds of batches up to this one, as retention does."""
    stream = sim.stream()
    stream.trim(sum(int(stored.headers.get("batch", 0)) <= batch for stored in stream.messages))


def replayed(
    folder: Path, seed: int | None = None, settings: Sequence[str] = SETTINGS, *, forgets: bool = False, **options: Any
) -> tuple[Simulation, Remembering]:
    """Run with a trainer that is killed behind checkpoints, at moments drawn with ``seed``; None: never.

    ``forgets``: retention removes each batch from the ready stream once it is trained on.
    """
    sim, learner = Simulation(folder, tuple(settings), batches=9, **options), Remembering()
    if forgets:
        learner.trains = lambda batch: trim(sim, batch)

    async def run() -> None:
        if seed is None:
            await sim.make_trainer(learner=learner).run()
        else:
            await lived(sim, lambda: sim.make_trainer(learner=learner), seed)

    run_virtually(sim.run(trainer=run), limit=5000)
    return sim, learner


def test_a_step_has_its_batch_and_groups_of_earlier_ones(tmp_path: Path) -> None:
    sim, learner = replayed(tmp_path)
    assert replayed_groups_per_step(sim.config) == 1, "a third of a step with two groups"
    assert [len(learner.fresh[step]) for step in range(1, 10)] == [2] * 9
    assert [len(learner.replayed[step]) for step in range(1, 10)] == [0] + [1] * 8
    metrics = [values for _, values in sim.reports if "replay/groups" in values]
    assert [one["replay/groups"] for one in metrics] == [0] + [1] * 8
    assert [one["replay/age/mean"] for one in metrics[1:]] == [1.0] * 8
    state = find_checkpoints(tmp_path / "checkpoints")[0][0].state
    entries = lineage(tmp_path / "history", state.generation, 9)
    assert [entry.get("replayed", []) for entry in entries] == [learner.replayed[step] for step in range(1, 10)]
    uids = [uid for entry in entries for uid in entry["uids"]]
    assert len(set(uids)) == len(uids) == 9 * 4, "what is fresh is recorded once"
    with_failures = replayed(
        tmp_path / "failures", spoil=lambda task_slice: "failed" if task_slice.batch in {2, 5} else None
    )[1]
    assert [len(with_failures.replayed[step]) for step in range(1, 8)] == [0] + [1] * 6


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_the_same_groups_are_chosen(tmp_path: Path, seed: int) -> None:
    settings = (*SETTINGS, *UNCACHED, "buffer.trainer_input.replay.sigma=2.0")
    _, whole = replayed(tmp_path / "whole", settings=settings)
    sim, broken = replayed(tmp_path / "broken", seed, settings=settings)
    first, *again = begun_at(sim)
    assert first is None
    assert all(again), f"each life goes on from a checkpoint, not from {again}"
    assert broken.replayed == whole.replayed
    assert broken.fresh == whole.fresh


def test_the_uses_of_replayed_groups_are_counted(tmp_path: Path) -> None:
    often = ("buffer.trainer_input.replay.sigma=100", "buffer.trainer_input.replay.max_uses=1")
    _, learner = replayed(tmp_path, settings=(*SETTINGS, *often))
    uses = Counter(tid for groups in learner.replayed.values() for tid in groups)
    assert len(uses) == 8
    assert set(uses.values()) == {1}
    state = find_checkpoints(tmp_path / "checkpoints")[0][0].state.source
    known = {group[0] for group in state["replay"]["groups"]}
    assert not known & uses.keys(), "what was used as often as it may be is forgotten"


def test_what_cannot_be_read_again_is_left_out_and_counted(tmp_path: Path) -> None:
    sim, learner = replayed(tmp_path, settings=(*SETTINGS, *UNCACHED), forgets=True)
    assert sorted(learner.fresh) == list(range(1, 10))
    assert not any(learner.replayed.values())
    assert sum(values.get("replay/lost_groups", 0) for _, values in sim.reports) == 16


def test_a_ticket_that_may_be_replayed_is_remembered_when_fewer_others_are(tmp_path: Path) -> None:
    replayed(tmp_path, settings=(*SETTINGS, "buffer.trainer_input.replay.max_age=9"))
    state = find_checkpoints(tmp_path / "checkpoints")[0][0].state.source
    kept = set(state["replay"]["offsets"])
    assert kept
    bus: Any = None
    config = load_config({"model": {"tiny": {}}, "algorithm": {"repeat_times": 2}}, [SHARE])
    source = ReplaySource(StreamSource(bus, Topology("r"), "trainer-0", remembered=1), config)
    source.restore(state)
    assert kept <= set(source.state()["consumed"])
    assert source.state()["settled"] == state["batches"] - 1


def test_blobs_of_groups_that_may_be_replayed_stay(tmp_path: Path) -> None:
    replayed(tmp_path, settings=(*SETTINGS, "buffer.trainer_input.replay.max_age=3"))
    state = find_checkpoints(tmp_path / "checkpoints")[0][0].state.source
    kept = set(state["replay"]["offsets"])
    assert set() < kept < set(state["consumed"])
    assert _consumed_tickets(state) == set(state["consumed"]) - kept
    assert _consumed_tickets({"consumed": ["a"]}) == {"a"}, "of a run that replays nothing"


# -- expert answers beside rollouts: a fixed number a step, each once an epoch


EXPERTS = {"solved": {"storage_type": "synthetic", "path": "max3", "schema_type": "sft"}}
MIX = (
    "algorithm={algorithm_type: mix, repeat_times: 2}",
    f"buffer.trainer_input.auxiliary_buffers={json.dumps(EXPERTS)}",
    "trainer.save_interval=3",
)
COUNT = 7


def experts(size: int) -> RecordSource:
    def rows(indexes: Sequence[int]) -> tuple[list[Experience], dict[str, float]]:
        return [Experience(tokens=[0, index], prompt_length=1, index=index) for index in indexes], {}

    data = ExperienceBufferConfig(storage_type="file", path="x", schema_type="sft", selector="sequential")
    return RecordSource(data, Records(COUNT, "numbers", rows), seed=0, size=size, batches=1 << 40)


class RememberingExperts(FakeLearner):
    """Notes the experts of each step."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.experts: dict[int, list[int]] = {}
        self.rollouts: dict[int, int] = {}

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        marked = [one for one in experiences if one.info.get("is_expert")]
        experts = [one.index or 0 for one in marked]
        assert self.experts.setdefault(step_number, experts) == experts, "a step made again has the same ones"
        self.rollouts[step_number] = len(experiences) - len(marked)
        return await super().step(experiences, step_number)


def mixed(folder: Path, seed: int | None = None, **options: Any) -> tuple[Simulation, RememberingExperts]:
    """Run with a trainer that is killed behind checkpoints, at moments drawn with ``seed``; None: never."""
    sim, learner = Simulation(folder, MIX, batches=9, **options), RememberingExperts()

    def trainer() -> Any:
        made = sim.make_trainer(learner=learner)
        source = made.loop.source
        made.loop.source = MixSource(source, experts(experts_per_step(sim.config)))
        return made

    async def run() -> None:
        if seed is None:
            await trainer().run()
        else:
            await lived(sim, trainer, seed)

    run_virtually(sim.run(trainer=run), limit=5000)
    return sim, learner


def test_every_step_has_the_same_number_and_the_rollouts_pace(tmp_path: Path) -> None:
    sim, learner = mixed(tmp_path)
    assert experts_per_step(sim.config) == 1, "a fifth of a step with four rollouts"
    assert learner.rollouts == dict.fromkeys(range(1, 10), 4)
    assert [learner.experts[step] for step in range(1, 10)] == [[n % COUNT] for n in range(9)]
    newest = find_checkpoints(tmp_path / "checkpoints")[0][0].state
    uids = [uid for entry in lineage(tmp_path / "history", newest.generation, 9) for uid in entry["uids"]]
    assert len(set(uids)) == len(uids) == 9 * 5


def test_killed_anywhere_each_expert_comes_once_an_epoch(tmp_path: Path) -> None:
    for seed in range(5):
        sim, learner = mixed(tmp_path / str(seed), seed)
        first, *again = begun_at(sim)
        assert first is None
        assert all(again), f"each life goes on from a checkpoint, not from {again}"
        trained = [learner.experts[step] for step in sorted(learner.experts)]
        assert trained == [[n % COUNT] for n in range(9)]


def test_a_batch_without_rollouts_takes_none(tmp_path: Path) -> None:
    def spoil(task_slice: Any) -> str | None:
        return "failed" if task_slice.batch in {2, 5} else None

    _, learner = mixed(tmp_path, spoil=spoil)
    assert Counter(index for step in learner.experts.values() for index in step) == Counter(range(COUNT))


# -- lives of a trainer in a simulated run, each killed behind a checkpoint


KILLED_AT = (4, 6, 8)
"""Progress at which lives of a run of nine batches end: each behind a checkpoint, with one every three batches."""


async def lived(sim: Simulation, make: Callable[[], Trainer], seed: int, ends: Sequence[int] = KILLED_AT) -> None:
    """Run trainers one after another, each killed within a step's time of reaching the next progress in ``ends``, and
    one until it ends by itself.
    """
    dice = random.Random(seed)
    for end in ends:
        trainer = make()
        life = asyncio.create_task(trainer.run())
        await until(lambda: trainer.loop.progress >= end)  # noqa: B023  # awaited here
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        assert await killed(life), f"it ended before it was killed at progress {end}"
    await make().run()


def begun_at(sim: Simulation) -> list[int | None]:
    """Return the progress of the checkpoint from which each life went on, None where it was at the first step."""
    files = sorted((sim.folder / "history").glob("*.jsonl"), key=lambda path: int(path.stem))
    origins = [json.loads(path.read_text().splitlines()[0])["resumed_from"] for path in files]
    return [origin and origin["progress"] for origin in origins]
