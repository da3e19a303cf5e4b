"""What may be said of engines and auxiliary models."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_mq.config import Config, ConfigError, load_config

JUDGE = {"name": "judge", "engine": "external", "url": "https://judge.example/v1", "api_key_env": "JUDGE_KEY"}
TEACHER = {"name": "teacher", "model": {"tiny": {}}, "engine_num": 2}


def load(*models: dict[str, Any], **sections: Any) -> Config:
    explorer = {"auxiliary_models": list(models), **sections.pop("explorer", {})}
    return load_config({"name": "c", "model": {"tiny": {}}, "explorer": explorer, **sections})


def test_auxiliary_models_keep_their_order_and_engines_default_to_one() -> None:
    config = load(JUDGE, TEACHER)
    assert [model.name for model in config.explorer.auxiliary_models] == ["judge", "teacher"]
    assert config.explorer.rollout_model.engine_num == 1
    assert load_config(config.model_dump(mode="json")) == config, "agents read what was written"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({**JUDGE, "url": None}, "needs url, such as https"),
        ({**JUDGE, "url": "judge.example"}, "got 'judge.example'"),
        ({**JUDGE, "model": {"tiny": {}}}, "is served elsewhere: remove model"),
        ({**JUDGE, "name": "The Judge"}, "name"),
        ({**JUDGE, "api_key_env": "sk-123"}, r"api_key_env: wanted the name of an environment variable.*itself$"),
        ({**JUDGE, "api_key_file": "/run/secrets/key"}, "api_key_env and api_key_file are both given"),
        ({**TEACHER, "api_key_file": "/run/secrets/key"}, "is served here: remove api_key_file"),
        ({**TEACHER, "url": "http://x/v1"}, "is served here: remove url"),
        ({"name": "teacher"}, "needs model, with a model_path or tiny"),
    ],
)
def test_what_does_not_fit_the_kind_of_engine_is_refused(model: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(model)
    with pytest.raises(ConfigError, match="auxiliary_models need different names"):
        load(JUDGE, {**TEACHER, "name": "judge"})
    with pytest.raises(ConfigError, match="takes no weights from the trainer"):
        load(explorer={"rollout_model": {"engine": "external"}})


def test_only_an_evaluation_may_be_answered_by_an_auxiliary_model() -> None:
    synthetic = {"storage_type": "synthetic", "path": "ops3"}
    asked = {**synthetic, "name": "e", "rollout_args": {"model": "judge"}}
    assert load(JUDGE, buffer={"eval_tasksets": [asked]}).buffer.eval_tasksets[0].rollout_args == {"model": "judge"}
    with pytest.raises(ConfigError, match=r"rollout_args.model is 'judge', wanted one of .*: teacher"):
        load(TEACHER, buffer={"eval_tasksets": [asked]})
    with pytest.raises(ConfigError, match="training tasks are answered by the policy"):
        load(JUDGE, buffer={"taskset": asked})
