"""``source.tap``: the mode that it makes, and what cannot be trained on data of another policy."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.config import Config, ConfigError, load_config

B: dict[str, Any] = {"name": "b", "model": {"tiny": {}}, "buffer": {"total_steps": 5}}


def tapping(*overrides: str, **more: Any) -> Config:
    return load_config({**B, **more}, ["source.tap=a", *overrides])


def test_it_makes_mode_train_of_a_configuration_that_rolls_out() -> None:
    assert tapping().mode == "train"
    assert tapping(mode="both").mode == "train"
    assert tapping(mode="train").source.start == "beginning"
    assert tapping("source.start=17").source.start == 17
    assert tapping().accepts_any_age
    assert load_config(B).mode == "both"
    taskset = {"name": "t", "storage_type": "synthetic", "path": "max3"}
    assert tapping("mode=bench", buffer={"eval_tasksets": [taskset]}).mode == "bench"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=explore"], "in mode explore, which makes its own rollouts"),
        (["source.tap=b"], "the name of this run itself"),
        (["source.start=0"], "source.start"),
        (["algorithm.algorithm_type=dpo"], "no loss for it"),
        (["algorithm.anchor=loglinear"], "weighs tokens by their age"),
        (["trainer.guard.max_mismatch=0.1"], "the sampler is another policy"),
        (["trainer.batches_per_step=2"], "batches_per_step is 2 in mode train"),
        (["buffer.trainer_input.replay.share=0.5"], "only rollouts that are trained on can be replayed"),
        (["buffer.trainer_input.experience_buffer={storage_type: file, path: x}"], "a run trains on one of the two"),
        (["algorithm.algorithm_type=gpg"], "gpg does not compare the policy with the policy that .*kind: weight"),
        (["algorithm.anchor=old"], "anchor is old without a correction.*kind: weight"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tapping(*overrides)


def test_a_loss_that_takes_all_data_for_its_own_needs_a_correction() -> None:
    for loss in ("algorithm_type=gpg", "anchor=old"):
        assert tapping(f"algorithm.{loss}", "algorithm.correction=[{kind: weight}]").mode == "train"
    assert tapping("algorithm.algorithm_type=sft").mode == "train", "whose answers are imitated makes no difference"
