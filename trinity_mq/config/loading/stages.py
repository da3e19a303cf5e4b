"""Stages: one file that describes several runs. Each run starts with the model of the previous run.

.. code-block:: yaml

    name: digits              # the names of the runs are digits-sft and digits-rl
    model: {tiny: {}}         # settings outside of ``stages`` apply to every stage
    stages:
      - stage_name: sft
        mode: train
        algorithm: {algorithm_type: sft}
      - stage_name: rl
        algorithm: {algorithm_type: grpo}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_mq.config.loading.load import (
    STAGES,
    ConfigError,
    SettingsSource,
    config_title,
    read_settings,
    validate_settings,
)
from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.config.modes.mode import TRAINING_MODES
from trinity_mq.config.run import Config
from trinity_mq.errors import suggest

STAGE_NAME = "stage_name"
ALTERNATIVES = (("model_path", "tiny"), ("total_steps", "total_epochs"), ("taskset", "tasksets"))
"""Mutually exclusive settings: a stage that sets one of them removes the others that the file sets."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of a file that describes several runs."""

    name: str
    """The ``stage_name``."""
    config: Config
    """The whole configuration of the stage."""
    begins_with: str | None
    """Name of the earlier stage whose trained model this stage starts with. None: the model of the configuration."""


def load_stages(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> list[Stage]:
    """Return the stages of a file in their order; an empty list if the file describes a single run.

    A stage's sections are merged into the sections of the file, key by key. Lists are replaced. ``algorithm`` is also
    replaced if the stage names an ``algorithm_type``, since the pieces of one algorithm mean little for another. An
    override on the command line counts as a setting of the file; ``stages.0.buffer.total_steps=10`` sets a value of the
    first stage.

    Raises:
        ConfigError: As :func:`trinity_mq.config.load_config`; ``stages`` is not a list of settings; a stage has no
            name or a name that is already used, or sets ``name`` or ``run_dir``; or an override has no effect, because
            each stage sets the value itself.
    """
    settings, where = read_settings(path, overrides), config_title(path)
    raw_stages = settings.pop(STAGES, None)
    if raw_stages is None:
        return []
    named = list(_named_stages(raw_stages, where))
    _check_overrides(overrides, [stage for _, stage in named])
    stages: list[Stage] = []
    for number, (name, stage) in enumerate(named):
        earlier = next((candidate for candidate in reversed(stages) if candidate.config.mode in TRAINING_MODES), None)
        source = SettingsSource(path, overrides, (STAGES, number))
        stages.append(_stage(name, merged(settings, stage), earlier, source))
    return stages


def merged(settings: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` overridden by the settings of a stage."""
    result = dict(settings)
    for key, value in stage.items():
        for alternatives in ALTERNATIVES:
            if key in alternatives and value is not None:
                for alternative in set(alternatives) - set(stage):
                    result.pop(alternative, None)
        before = result.get(key)
        is_replaced = key == "algorithm" and isinstance(value, Mapping) and "algorithm_type" in value
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not is_replaced:
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def _named_stages(stages: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ConfigError(Secrets(stages).hide(f"{where}: {STAGES}: wanted a list of stages, got {stages!r}"))
    names: list[str] = []
    for number, entry in enumerate(stages):
        place = f"{where}: {STAGES}.{number}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get(STAGE_NAME), str) or not entry[STAGE_NAME]:
            wrong = f"{place}: wanted settings with a {STAGE_NAME}, such as sft, got {entry!r}"
            raise ConfigError(Secrets(stages).hide(wrong))
        name = entry[STAGE_NAME]
        if name in names:
            raise ConfigError(
                f"{place}: {STAGE_NAME} {name!r} is already the name of an earlier stage; give each stage a different "
                "name"
            )
        names.append(name)
        stage = {key: value for key, value in entry.items() if key != STAGE_NAME}
        for key, reason in {
            "name": f"follows from {STAGE_NAME}",
            "run_dir": "follows from run_dir of the file",
        }.items():
            if key in stage:
                raise ConfigError(f"{place}.{key}: a stage cannot set it, since it {reason}; remove it")
        yield name, stage


def _stage(name: str, settings: dict[str, Any], earlier: Stage | None, source: SettingsSource) -> Stage:
    settings["name"] = f"{settings.get('name', 'run')}-{name}"
    if settings.get("run_dir"):
        settings["run_dir"] = f"{str(settings['run_dir']).rstrip('/')}-{name}"
    if earlier is not None:
        model = {key: value for key, value in settings.get("model", {}).items() if key not in {"tiny", "model_path"}}
        settings["model"] = {**model, "model_path": str(final_model(earlier.config))}
    config = validate_settings(settings, f"{config_title(source.path)}: stage {name}", source)
    return Stage(name, config, None if earlier is None else earlier.name)


def final_model(config: Config) -> Path:
    """Return the folder of a run's trained model."""
    return (config.path / "final").absolute()


def _check_overrides(overrides: Sequence[str], stages: Sequence[Mapping[str, Any]]) -> None:
    for word in overrides:
        key, _, value = word.partition("=")
        parts = key.split(".")
        if parts[0] == STAGES or not all(_sets(stage, parts) for stage in stages):
            continue
        wrong = (
            f"override {key}: every stage sets it, so this override would have no effect; name the stage: "
            f"{STAGES}.0.{word}"
        )
        raise ConfigError(Secrets({key: value}).hide(wrong))


def _sets(stage: Mapping[str, Any], parts: Sequence[str]) -> bool:
    """Return whether a stage sets a value at a key."""
    here: Any = stage
    for part in parts:
        if not isinstance(here, Mapping):
            return True
        if part not in here:
            return False
        here = here[part]
    return True


def find_stage(stages: Sequence[Stage], name: str) -> Stage:
    """Return the stage of this name.

    Raises:
        ConfigError: No stage has this name.
    """
    for stage in stages:
        if stage.name == name:
            return stage
    raise ConfigError(f"no stage is called {name!r}; {suggest(name, [stage.name for stage in stages])}")
