"""The report of a run as text and as one page: what is in it, that it needs nothing else, that names break nothing."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.observability.report.curves import downsample
from trinity_mq.observability.report.text import distinct, loss_counts, make_report, metric_curve, newest_checkpoint
from trinity_mq.telemetry import METRICS_FILE, MetricsWriter


def test_report_of_a_run(tmp_path: Path) -> None:
    trainer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    explorer = MetricsWriter(tmp_path, "explorer", "explorer-0", tensorboard=False)
    explorer.write(0, {"eval/held_out/accuracy/mean@1": 0.0})
    for step in range(1, 11):
        explorer.write(step, {"rollout/reward/mean": step / 10, "rollout/slices/failed": 1})
        trainer.write(step, {"actor/pg_loss": 0.0, "sample/skipped_step": 0})
    explorer.write(10, {"eval/held_out/accuracy/mean@1": 0.9})
    trainer.close()
    explorer.close()
    saved = checkpoint(tmp_path, 1, 10)
    (tmp_path / "final").mkdir()
    lines = make_report("r", tmp_path).splitlines()
    assert lines[0] == "run r: 10 steps, 0 s from first to last"
    assert lines[1] == "  accuracy    0.000 -> 0.900  ▁█  held_out, steps 0 to 10"
    assert lines[2].startswith("  reward      0.100 -> 1.000  ▁▁▂▃▄▅▆▇")
    assert lines[3] == "  lost        10 slices failed"
    assert lines[4] == f"  model       {tmp_path}/final  (Hugging Face folder)"
    assert lines[5] == f"  checkpoint  {saved}"
    assert f"{tmp_path}/metrics.jsonl" in lines[6]
    assert lines[7] == f"  logs        {tmp_path}/logs"


def test_where_reward_and_accuracy_are_flat_the_curve_that_moved_is_shown(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    for step in range(1, 4):
        writer.write(step, {"rollout/reward/mean": 0.0, "actor/pg_loss": 0.0, "advantage/kl/mean": 3.0 - step})
    writer.close()
    lines = make_report("r", tmp_path).splitlines()
    assert lines[1].startswith("  reward      0.000 -> 0.000")
    assert lines[2] == "  advantage/kl/mean 2.000 -> 0.000  █▅▁"
    moving = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    moving.write(4, {"rollout/reward/mean": 0.5})
    moving.close()
    assert "advantage/kl/mean" not in make_report("r", tmp_path)


def test_report_of_a_run_without_checkpoint_in_a_folder_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    assert "no metrics yet" in make_report("r", folder)
    writer = MetricsWriter(folder, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.0})
    writer.close()
    text = make_report("r", folder)
    assert text.startswith("run r: 1 step, 0 s")
    for part in ("lost        nothing", "model       none yet", "checkpoint  none yet"):
        assert part in text
    assert f"`tensorboard --logdir '{folder}/tensorboard'`" in text, "it can be pasted"


def checkpoint(run_dir: Path, generation: int, progress: int) -> Path:
    state = {"generation": generation, "step": progress, "progress": progress, "source": {}}
    folder = run_dir / "checkpoints" / f"progress-{progress:06d}"
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps({"state": state, "files": {}}))
    return folder


def test_the_newest_checkpoint_is_the_one_that_a_trainer_goes_on_from(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, 90)
    newest = checkpoint(tmp_path, 2, 50)
    (tmp_path / "checkpoints" / "attempts.json").write_text("{}")
    (checkpoint(tmp_path, 3, 70) / "trainer.json").write_text("cut off")
    assert newest_checkpoint(tmp_path) == newest
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_steps_that_were_done_again_count_once() -> None:
    lines = [
        {"role": "trainer", "step": 1, "a": 1.0},
        {"role": "trainer", "step": 2, "a": 2.0},
        {"role": "explorer", "step": 1, "b": 5.0},
        {"role": "trainer", "step": 1, "a": 10.0},
        {"role": "explorer", "step": 1, "c": 6.0},
        {"step": 3, "a": 9.0},
        {"role": "trainer", "a": 9.0},
        {"role": "trainer", "step": 3, "a": None},
    ]
    found = distinct(lines)
    assert metric_curve(found, "a") == [(1, 10.0), (2, 2.0)]
    assert metric_curve(found, "b") == [(1, 5.0)]
    assert metric_curve(found, "c") == [(1, 6.0)]


def test_lost_counts_only_what_is_there() -> None:
    lines = [
        {"step": 1, "sample/skipped_step": 1, "rollout/slices/failed": 0},
        {"step": 2, "sample/skipped_step": 1.0, "sample/dropped_stale_groups": 3},
    ]
    lines += [{"step": 2, "sample/dropped_stale_groups": 3}]  # another agent says the same
    assert loss_counts(lines) == {"steps skipped": 2, "groups too old": 3}
    skips = [{"step": 1, "actor/skipped_norm_spike": 1.0, "actor/skipped_nonfinite_loss": 0.0}]
    assert loss_counts(skips) == {"optimizer steps with too large a gradient": 1}
    assert loss_counts([]) == {}


# -- the page

SETTINGS: dict[str, Any] = {
    "name": "shown",
    "model": {"tiny": {}},
    "broker": {"url": "amqp://me:secret@host/"},
    "buffer": {"total_steps": 4},
}


def run_folder(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    with (folder / METRICS_FILE).open("w") as file:
        for number, line in enumerate(lines):
            file.write(json.dumps({"time": 100.0 + number, "role": "trainer", "agent": "t", **line}) + "\n")
    return folder


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "rollout/reward/mean": step / 4, "time/batch": 1.0} for step in range(1, 5)
    ]
    lines += [
        {"step": step, "eval/held/accuracy/mean@4": step / 4, "eval/held/pass@4": 1.0, "eval/b/accuracy/mean@4": 0.5}
        for step in (0, 4)
    ]
    lines.append({"step": 4, "eval/of/detail/pass@4/mean": 0.125, "eval/of/detail/pass@4/max": 1.0})
    lines.append({"step": 4, "sample/dropped_stale_groups": 3.0, "odd/<script>alert(1)</script>": 1.0})
    folder = run_folder(tmp_path / "run", *lines)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"the report is in {folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    texts = [words.strip() for words in re.findall(r">([^<>]+)<", text)]
    assert texts.count("shown") == 2, "title and heading"
    assert "groups too old" in " ".join(texts)
    assert {"held", "of/detail", "accuracy/mean@4", "pass@4", "1.000", "0.125"} <= set(texts)
    assert text.count("<svg") == 4, "accuracy, pass@k, reward, seconds; what is not known has none"
    assert "<script" not in text
    assert {link[0] for link in re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", text)} <= {"#"}, "of elsewhere"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids) > 0, "the pictures' names are apart"
    assert "secret" not in text
    assert "total_steps: 4" in text


def test_without_metrics_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_folder(tmp_path / "run"))]) == 2
    assert "run 'shown' has no metrics yet in" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", True])
def test_values_that_cannot_be_drawn_break_nothing(tmp_path: Path, value: Any) -> None:
    folder = run_folder(tmp_path / "run", {"step": 1, "actor/entropy": value}, {"step": 2, "actor/grad_norm": 1.0})
    assert main(["report", str(folder)]) == 0


def test_a_long_curve_is_averaged_and_keeps_its_end() -> None:
    points = [(step, float(step)) for step in range(1000)] + [(1000, math.nan)]
    found = downsample(points, 10)
    assert len(found) == 10
    assert found[0] == (99, 49.5)
    assert found[-1] == (999, 949.5)
    assert downsample(points[:5], 10) == points[:5]


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = run_folder(tmp_path / "run", {"step": 1, "actor/entropy": 1.0})
    assert main(["report", str(folder)]) == 2
    assert "pip install 'trinity-mq[report]'" in capsys.readouterr().err
