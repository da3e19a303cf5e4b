from __future__ import annotations

import json
from pathlib import Path

from trinity_mq.observability.report.text import distinct, loss_counts, make_report, metric_curve, newest_checkpoint
from trinity_mq.telemetry import MetricsWriter


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


def test_the_tensorboard_command_of_a_folder_with_spaces_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    writer = MetricsWriter(folder, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.0})
    writer.close()
    assert f"`tensorboard --logdir '{folder}/tensorboard'`" in make_report("r", folder)


def test_report_of_a_run_that_got_nowhere(tmp_path: Path) -> None:
    assert "no metrics yet" in make_report("r", tmp_path)


def test_report_of_a_run_without_checkpoint(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.0})
    writer.close()
    text = make_report("r", tmp_path)
    assert text.startswith("run r: 1 step, 0 s")
    assert "lost        nothing" in text
    assert "model       none yet" in text
    assert "checkpoint  none yet" in text


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
    ]
    found = distinct(lines)
    assert metric_curve(found, "a") == [(1, 10.0), (2, 2.0)]
    assert metric_curve(found, "b") == [(1, 5.0)]
    assert metric_curve(found, "c") == [(1, 6.0)]


def test_curves_leave_out_what_is_not_known() -> None:
    assert metric_curve([{"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 1}], "a") == [(3, 1.0)]


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
