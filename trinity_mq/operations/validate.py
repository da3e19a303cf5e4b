"""Checks of a configuration before a run starts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trinity_mq.config import Config, ConfigError, ExperienceBufferConfig, TasksetConfig
from trinity_mq.config.algorithm.pieces import PluginPiece
from trinity_mq.config.estimators import EstimatorPlugin
from trinity_mq.config.loading.secrets import Secrets
from trinity_mq.config.model import ModelConfig
from trinity_mq.config.modes.mode import TRAINING_MODES
from trinity_mq.config.switches import SWITCHES, SwitchError
from trinity_mq.config.sync import GLOO
from trinity_mq.data import open_taskset
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import read_records
from trinity_mq.engines.host.ready_file import free_gpus
from trinity_mq.engines.protocol import create_engine
from trinity_mq.families.family import Family
from trinity_mq.families.switches import merge_switch_fields, template_switches
from trinity_mq.families.table import family_of, find_family
from trinity_mq.messages import DecodeError
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import (
    configured_template,
    has_chat_template,
    local_model_folder,
    read_chat_template,
)
from trinity_mq.operations.memory import estimate_memory
from trinity_mq.operations.plan import RunPlan
from trinity_mq.renamed import changed_meanings
from trinity_mq.rewards import RewardError, create_reward, find_reward
from trinity_mq.runtime.errors import FatalError, describe_error
from trinity_mq.runtime.gpus import PRETEND_VARIABLE, Gpu, GpuReport
from trinity_mq.runtime.placement import place_run, run_needs
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.transport.blobs import StoreUnavailable, open_store

PLAIN_WORKFLOWS = frozenset({"simple_workflow", "math_workflow", "math_answer_workflow"})
"""Built-in workflows that need neither arguments nor recorded calls. The same names with the prefix ``async_`` count
too."""
GREEDY_WORKFLOWS = PLAIN_WORKFLOWS | {"math_boxed_workflow", "boxed_answer_workflow", "tool_choice_workflow"}
"""Built-in workflows that can make a greedy rollout."""
RECORDS = "buffer.trainer_input"
"""Key of the training data in maps by model name. It differs from all names of models, because it contains dots."""
WARNING = ": warning: "
"""Text in each line that warns: the run can start, but a program that it may need is not on this machine, or a setting
has no effect."""


def check_all(config: Config, *, needs_model: bool = True) -> list[str]:
    """Run all checks that are possible on this machine before a run starts, and return lines that describe its parts.

    Args:
        config: The configuration.
        needs_model: True if the policy's model must exist. False if an earlier stage will train it.

    Raises:
        ConfigError: Lists all problems, one per line.
    """
    add_plugins(config.plugin_dirs)
    checks = (
        check_tasksets,
        check_greedy_runs,
        check_workflows,
        check_names,
        check_outsiders,
        check_operators,
        check_algorithm,
        *([check_models, check_switches] if needs_model else []),
        check_devices,
        check_optimizer,
        check_lora,
        check_router_replay,
        check_blob_store,
        check_checkpoints,
        check_trackers,
    )
    return _collect(functools.partial(check, config) for check in checks)


def _collect(checks: Iterable[Callable[[], list[str]]]) -> list[str]:
    """Run all checks and return their lines.

    Raises:
        ConfigError: Lists the problems of all checks, one per line.
    """
    lines, problems = [], []
    for check in checks:
        try:
            lines += check()
        except (ConfigError, TasksetError, FatalError) as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return lines


@contextlib.contextmanager
def _errors_of(place: str, subject: str = "code of your own", *explained: type[Exception]) -> Iterator[None]:
    """Turn an error in the ``with`` block into a ConfigError. ConfigError and TasksetError are not changed.

    Args:
        place: Place in the configuration, which begins the message.
        subject: Description of the user's code. The message of an unexpected error contains it and the failing line.
        explained: Classes of further expected errors. Their messages are kept, after ``place``.
    """
    expected: tuple[type[Exception], ...] = (FatalError, *explained)
    try:
        yield
    except (ConfigError, TasksetError):
        raise
    except expected as error:
        raise ConfigError(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:  # user code can raise any error
        raise ConfigError(f"{place}: {subject} cannot be used: {describe_error(error)}") from error


def imports_torch(config: Config) -> bool:
    """Return whether :func:`check_all` must import torch for this configuration."""
    needed = (
        bool(config.operator.operators)
        or bool(_custom_pieces(config))
        or needs_cuda(config)
        or _needs_optional_optimizer(config)
        or bool(config.model.lora)
        or config.model.router_replay
        or bool(config.outsiders.workflows)
        or not all(map(is_plain, tasksets(config)))
    )
    with contextlib.suppress(ModelError):  # check_models reports this error
        return needed or _lacks_template(config.model)
    return needed


def tasksets(config: Config) -> tuple[TasksetConfig, ...]:
    """Return the tasksets that the run reads in its mode."""
    return (*_training_tasksets(config), *(() if config.mode == "train" else config.buffer.eval_tasksets))


def _training_tasksets(config: Config) -> tuple[TasksetConfig, ...]:
    """Return the tasksets whose tasks the run trains on in its mode."""
    return () if config.mode in {"train", "bench"} else config.buffer.training_tasksets


def is_plain(taskset: TasksetConfig) -> bool:
    """Return whether a taskset uses only :data:`PLAIN_WORKFLOWS`, without arguments."""
    names = {name.removeprefix("async_") for name in taskset.workflows}
    return names <= PLAIN_WORKFLOWS and not taskset.workflow_args


def _custom_pieces(config: Config) -> list[PluginPiece | EstimatorPlugin]:
    """Return the user-defined functions among the parts of the algorithm."""
    algorithm = config.algorithm
    pieces = (
        algorithm.surrogate,
        *algorithm.correction,
        algorithm.kl_loss,
        algorithm.entropy_loss,
        algorithm.estimator,
    )
    return [piece for piece in pieces if isinstance(piece, PluginPiece | EstimatorPlugin)]


def _needs_optional_optimizer(config: Config) -> bool:
    """Return whether the optimizer may need software that is not installed."""
    return config.algorithm.optimizer.optimizer_type in {"adamw_8bit", "muon"}


def needs_cuda(config: Config) -> bool:
    """Return whether the run cannot work without CUDA."""
    return config.model.device == "cuda" or config.synchronizer.uses_nccl


def check_tasksets(config: Config) -> list[str]:
    """Open every taskset once, or in mode ``train`` the training data, to find unreadable data before processes start.
    Return a line for each of them.

    Raises:
        TasksetError: The training data, or the run that the trainer taps, cannot be read.
        ConfigError: A taskset cannot be read, or a reward function is not known or does not accept its arguments.
        FatalError: A folder of ``plugin_dirs`` cannot be used.
    """
    add_plugins(config.plugin_dirs)
    if config.mode == "train" and config.source.tap:
        return [_check_tapped(config)]
    if config.mode == "train":
        data = config.buffer.trainer_input.experience_buffer
        with _errors_of(f"training data {data.name!r}", f"storage {data.storage_type!r}"):
            return [_check_records(data)]
    checks = (_check_reward, _check_taskset)
    return _collect(functools.partial(check, config, taskset) for taskset in tasksets(config) for check in checks)


def _check_reward(_config: Config, taskset: TasksetConfig) -> list[str]:
    for name in filter(None, taskset.reward_fns):  # if empty, the workflow brings its own reward function
        with _errors_of(f"taskset {taskset.name!r}", f"reward function {name!r}", RewardError):
            create_reward(name, taskset.reward_fn_args)
    return []


def _check_taskset(config: Config, taskset: TasksetConfig) -> list[str]:
    if not taskset.storage.holds_records:
        return [f"taskset {taskset.name!r}: tasks submitted from outside"]
    kind = taskset.effective_selector.selector_type
    with _errors_of(f"taskset {taskset.name!r}", f"selector {kind!r}"):
        tasks = open_taskset(taskset, seed=config.seed, max_bytes=config.broker.max_task_bytes)
    selector = "" if kind == taskset.selector else f", chosen by {kind}"
    return [f"taskset {taskset.name!r}: {len(tasks)} tasks from {taskset.path}{selector}"]


def _check_tapped(config: Config) -> str:
    from trinity_agents.trainer.sources.tapped_run import TappedRun

    run = TappedRun.of(config)
    where = "on the same broker" if run.config is None else f"in {run.config.path}"
    return f"training data: what run {run.name!r} {where} saw, from {config.source.start} on"


def _check_records(data: ExperienceBufferConfig) -> str:
    if data.schema_type == "experience":
        path = Path(data.path).expanduser()
        if not path.exists():
            raise TasksetError(f"training data {data.name!r}: there is no {path}")
        return f"training data {data.name!r}: experiences recorded in {path}"
    rows, _ = read_records(data)
    return f"training data {data.name!r}: {len(rows)} records from {data.path}"


def check_names(config: Config) -> list[str]:
    """Return a line for each workflow and reward function whose name had another meaning in release 0.2."""
    return changed_meanings(config.model_dump(mode="json", include={"buffer"}))


def check_greedy_runs(config: Config) -> list[str]:
    """Check that built-in workflows make the greedy rollout that the estimator needs, and that no workflow makes a
    greedy rollout that the estimator does not use.

    Raises:
        ConfigError: The greedy rollout is missing, or would not be used.
    """
    return _collect(functools.partial(_check_greedy, config, taskset) for taskset in _training_tasksets(config))


def _check_greedy(config: Config, taskset: TasksetConfig) -> list[str]:
    estimator = config.algorithm.estimator
    is_made = bool(taskset.workflow_args.get("greedy_baseline"))
    is_wanted = getattr(estimator, "baseline", None) == "greedy"
    able = [name for name in taskset.workflows if name.removeprefix("async_") in GREEDY_WORKFLOWS]
    if is_wanted and not is_made and able:
        raise ConfigError(
            f"algorithm {config.algorithm.algorithm_type} compares the runs of a task with a greedy one, and workflow "
            f"{able[0]!r} makes none; set buffer.taskset.workflow_args.greedy_baseline: true"
        )
    if is_made and not is_wanted:
        raise ConfigError(
            f"buffer.taskset.workflow_args.greedy_baseline is true, and the estimator of "
            f"{config.algorithm.algorithm_type} has no use for a greedy run, which is not trained on; remove it, or "
            "set algorithm.estimator.baseline: greedy"
        )
    return []


def check_workflows(config: Config) -> list[str]:
    """Import the workflows of all tasksets, except for tasksets that use only :data:`PLAIN_WORKFLOWS` without
    arguments. Return a line for each user-defined workflow, and a warning for each program that a workflow needs and
    this machine lacks.

    Raises:
        ConfigError: A workflow is not known, cannot be imported, does not accept its arguments, or needs recorded calls
            while recording is disabled.
    """
    return _collect(
        functools.partial(_check_workflow, config, taskset, name)
        for taskset in tasksets(config)
        if not is_plain(taskset)
        for name in taskset.workflows
    )


def _check_workflow(config: Config, taskset: TasksetConfig, name: str) -> list[str]:
    from trinity_mq.workflows import WORKFLOWS, TaskError, check_arguments, load_workflow
    from trinity_mq.workflows.builtin.simple import SimpleArguments
    from trinity_mq.workflows.builtin.tool_agent import ToolAgentArguments
    from trinity_mq.workflows.builtin.tools import Toolbox

    with _errors_of(f"taskset {taskset.name!r}", f"workflow {name!r}", TaskError):
        kind = load_workflow(name)
        takes = kind.arguments_kind or (SimpleArguments if name in WORKFLOWS else None)
        if takes is not None:
            check_arguments(taskset.workflow_args, takes)
        if takes is not None and issubclass(takes, ToolAgentArguments):
            Toolbox(taskset.workflow_args.get("tools", ()))
    if kind.needs_history and not config.explorer.rollout_model.enable_history:
        raise ConfigError(
            f"taskset {taskset.name!r}: workflow {name!r} makes its experiences from recorded calls; "
            "set explorer.rollout_model.enable_history: true"
        )
    lines = _missing(taskset, takes)
    if name not in WORKFLOWS:
        lines.insert(0, f"taskset {taskset.name!r}: workflow {kind.__name__} from {inspect.getfile(kind)}")
    return lines


def _missing(taskset: TasksetConfig, takes: type[BaseModel] | None) -> list[str]:
    """Return a warning for each program that the workflow needs and this machine lacks; an empty list if the needs are
    not known. A missing program is not an error, because runners may be on other machines.
    """
    from trinity_mq.workflows import Arguments

    if takes is None or not issubclass(takes, Arguments):
        return []
    try:
        arguments = takes.model_validate(dict(taskset.workflow_args))
    except ValidationError:  # records may have the other arguments
        return []
    return [f"taskset {taskset.name!r}{WARNING}{reason}" for reason in arguments.missing()]


def check_outsiders(config: Config) -> list[str]:
    """Check the workflows and reward functions that external clients may name.

    Raises:
        ConfigError: A workflow or reward function is not known or cannot be imported.
    """
    outsiders = config.outsiders
    with _errors_of("outsiders"):
        if outsiders.workflows:
            from trinity_mq.workflows import load_workflow

            for name in outsiders.workflows:
                load_workflow(name)
        for name in outsiders.rewards:
            find_reward(name)
    return []


def check_operators(config: Config) -> list[str]:
    """Create the operators of the chain. Return a line that lists them, or nothing for an empty chain.

    Raises:
        ConfigError: An operator is not known or does not accept its arguments.
    """
    if not config.operator.operators:
        return []
    from trinity_mq.operators import OperatorConfigError, create_operators  # imports torch

    for operator in config.operator.operators:
        args = Secrets(operator.args).hide(repr(operator.args))
        subject = f"operator {operator.name!r} with args {args}"
        with _errors_of("operator.operators", subject, OperatorConfigError):
            create_operators([operator])
    return [f"operators, before the advantage: {', '.join(operator.name for operator in config.operator.operators)}"]


def check_algorithm(config: Config) -> list[str]:
    """Import the user-defined parts of the loss and a user-defined estimator. Return a line for each. In mode ``bench``
    nothing is imported.

    Raises:
        ConfigError: A function cannot be imported, or does not accept its arguments.
    """
    pieces = [] if config.mode == "bench" else _custom_pieces(config)
    if not pieces:
        return []
    from trinity_mq.algorithms.class_losses import load_classes  # imports torch
    from trinity_mq.algorithms.estimators.plugin import check_plugin
    from trinity_mq.algorithms.plugins import load_plugins

    with _errors_of("algorithm"):
        load_plugins(config.algorithm)
        load_classes(config.algorithm)
        if isinstance(config.algorithm.estimator, EstimatorPlugin):
            check_plugin(config.algorithm.estimator)
    return [f"algorithm: your own {piece.kind}" for piece in pieces]


def check_models(config: Config) -> list[str]:
    """Look for the model folders without downloading or loading a model. Return a line for each model to be downloaded,
    and a remark if the policy's model lacks a chat template that no workflow needs.

    Raises:
        ModelError: A folder does not exist or does not hold a model.
        ConfigError: The model has no chat template, which a workflow needs.
    """
    lines = []
    for model in (config.model, *(auxiliary.model for auxiliary in config.explorer.auxiliary_models)):
        if model is None or model.model_path is None:
            continue
        folder = local_model_folder(model.model_path)
        if folder is None:
            lines.append(f"model {model.model_path}: a hub id, fetched when the run starts")
    if _lacks_template(config.model):
        name = f"model {config.model.model_path}" if config.model.tiny is None else "model.tiny"
        lines += _check_without_template(config, name)
    return lines


def _lacks_template(model: ModelConfig) -> bool:
    """Return whether a model is on this machine and has no chat template.

    Raises:
        ModelError: The folder of the model, or the file of its chat template, cannot be used.
    """
    if configured_template(model) is not None:
        return False
    if model.tiny is not None:
        return not model.tiny.chat_template
    folder = local_model_folder(str(model.model_path))
    return folder is not None and not has_chat_template(folder)


def check_switches(config: Config) -> list[str]:
    """Compare the switches of the models and of ``rollout_args`` with the chat templates, where these are on this
    machine.

    Raises:
        ConfigError: A chat template does not read a switch, or cannot follow its value; or a ``family`` does not exist.
    """
    models = {"": config.model} | {auxiliary.name: auxiliary.model for auxiliary in config.explorer.auxiliary_models}
    uses: list[tuple[str, str, Mapping[str, Any]]] = [
        ("model.chat_template_kwargs" if not name else f"explorer.auxiliary_models {name!r}", name, {})
        for name in models
    ]
    uses += [
        (f"rollout_args of taskset {taskset.name!r}", taskset.rollout_args.get("model", ""), taskset.task_rollout_args)
        for taskset in tasksets(config)
    ]
    templates = {name: "" if model is None else _chat_template(model) for name, model in models.items()}
    if config.mode == "train":
        data = config.buffer.trainer_input.experience_buffer
        uses.append((f"format of the training data {data.name!r}", RECORDS, data.format.switches))
        models[RECORDS] = config.model
        templates[RECORDS] = data.format.chat_template or templates[""]
    for setting, name, fields in uses:
        model, template = models.get(name), templates.get(name)
        if model is None or not template:
            continue
        merged = merge_switch_fields({SWITCHES: model.chat_template_kwargs}, fields)
        family = _family(model, template)
        try:
            template_switches(merged, template, family.thoughts)
        except SwitchError as error:
            raise ConfigError(f"{setting}: {error}") from error
    return []


def _family(model: ModelConfig, template: str) -> Family:
    with _errors_of(f"family of model {model.model_path}"):
        return family_of(template) if model.family is None else find_family(model.family)


def _chat_template(model: ModelConfig) -> str:
    try:
        if (template := configured_template(model)) is not None:
            return template
        if model.tiny is not None:
            return model.tiny.chat_template
        folder = local_model_folder(str(model.model_path))
    except ModelError:  # check_models reports this error
        return ""
    return "" if folder is None else read_chat_template(folder)


def _check_without_template(config: Config, model: str) -> list[str]:
    from trinity_mq.workflows import WORKFLOWS  # imports torch

    remark = f"{model} has no chat template, so it answers no chat requests"
    for taskset in tasksets(config):
        name = next((name for name in taskset.workflows if name in WORKFLOWS), None)
        if taskset.storage.holds_records and name is not None:
            raise ConfigError(
                f"{remark}, and workflow {name!r} makes them: use an instruction-tuned model, or put a "
                "chat_template.jinja into its folder"
            )
    return [remark]


def check_devices(config: Config) -> list[str]:
    """Look for the devices and the software that engines, trainer and weight sync need on this machine. If it has GPUs,
    return a line on the GPUs of each process.

    Raises:
        ConfigError: A required device does not exist, its memory does not suffice, or NCCL cannot be used.
        PlacementError: There are too few GPUs.
        ModelError: The software of an engine is not installed, or its version is not supported.
        UnknownNameError: An engine cannot be imported.
    """
    explorer = config.explorer
    for name in dict.fromkeys([explorer.rollout_model.engine, *(model.engine for model in explorer.auxiliary_models)]):
        create_engine(name).check()
    report = free_gpus(config.path) if run_needs(config) else GpuReport([])
    gpus = list(report.gpus)
    if needs_cuda(config) and not gpus and run_needs(config) and PRETEND_VARIABLE in os.environ:
        raise ConfigError(f"model.device or synchronizer.backend needs a GPU, and none is visible ({report.why})")
    if needs_cuda(config) and PRETEND_VARIABLE not in os.environ:
        seen_by_torch = _check_cuda(config)
        gpus = gpus or seen_by_torch
    placement = place_run(config, gpus)
    if not gpus:
        return []
    if any(gpu.total is None for gpu in gpus):
        return [str(placement)]
    plan = RunPlan(config, placement, estimate_memory(config, "cuda"))
    if problems := plan.problems:
        raise ConfigError("\n".join(problems))
    return [str(placement)]


def _check_cuda(config: Config) -> list[Gpu]:
    """Look for CUDA and NCCL with torch, for a configuration that requires them, and return the GPUs that torch sees.

    Raises:
        ConfigError: They cannot be used.
    """
    import torch
    from torch import distributed

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.model.device == "cuda" and not count:
        raise ConfigError("model.device is cuda, and torch sees no CUDA device here; use model.device=auto or cpu")
    if not config.synchronizer.uses_nccl:
        return [Gpu(entry=str(number)) for number in range(count)]
    missing = {
        "model.device is cpu": config.model.device == "cpu",
        "torch sees no GPU here": not count,
        "this torch is built without NCCL": not distributed.is_nccl_available(),
    }
    if reason := next((words for words, holds in missing.items() if holds), None):
        raise ConfigError(f"synchronizer.backend is nccl, which sends weights between GPUs, and {reason}; use {GLOO}")
    return [Gpu(entry=str(number)) for number in range(count)]


def check_optimizer(config: Config) -> list[str]:
    """Look for the software that the optimizer needs. Return a warning if the learning rate should fall and stays
    constant.

    Raises:
        LearnerError: The software is not installed.
    """
    if _needs_optional_optimizer(config):
        from trinity_mq.training.optimizers import check_installed  # imports torch

        check_installed(config.algorithm.optimizer)
    schedule = config.algorithm.optimizer.lr_scheduler_type
    if config.mode not in TRAINING_MODES or schedule == "constant" or config.learning_rate_falls:
        return []
    return [
        f"algorithm.optimizer{WARNING}lr_scheduler_type is {schedule} and buffer.total_steps is not set: the trainer "
        "does not know the number of train steps, so the learning rate stays constant after the warm-up; set "
        "buffer.total_steps, or lr_scheduler_type to constant"
    ]


def check_lora(config: Config) -> list[str]:
    """Check that the software for adapters is installed and that the model has the target layers.

    Raises:
        AdapterError: The software is not installed, or the model does not have these layers.
    """
    if config.model.lora is not None:
        from trinity_mq.training.model.lora import check_installed, check_targets  # imports torch

        check_installed(config.model.lora)
        check_targets(config.model)
    return []


def check_router_replay(config: Config) -> list[str]:
    """Check that the model has routers whose choices can be replayed, and return a line on them. Return an empty list
    if ``model.router_replay`` is off, or if the model's architecture is not on this machine.

    Raises:
        ModelError: The model does not have such routers.
    """
    if config.model.router_replay:
        from trinity_mq.models.model_folder import empty_model  # imports torch
        from trinity_mq.models.routers import Routers

        if (model := empty_model(config.model)) is not None:
            routers = Routers(model)
            return [f"router replay: {routers.shape.layers} layers, {routers.shape.top_k} experts for each token"]
    return []


def check_blob_store(config: Config) -> list[str]:
    """If a blob store is configured, write, read and delete a small blob and return a line on it.

    Raises:
        ConfigError: The write, read or delete failed.
        FatalError: The library for this kind of store is not installed.
    """
    store = open_store(config.broker, config.name)
    if store is None:
        return []
    with _errors_of("broker.blob_store", f"store {store.url}", StoreUnavailable, DecodeError):
        reference = store.put(f"check/{uuid.uuid4().hex}", b"x")
        store.get(reference)
        store.delete("check")
    return [f"blob store {store.url}: can be written and read"]


def check_checkpoints(config: Config) -> list[str]:
    """Look for the checkpoints that mode ``bench`` evaluates; return a line that lists them.

    Raises:
        CheckpointError: No checkpoint exists.
    """
    if config.mode != "bench":
        return []
    from trinity_mq.training.checkpoints.benchmarked import select_checkpoints

    labels = ", ".join(str(label) for label in select_checkpoints(config))
    return [f"checkpoints of {config.bench.run}, by batches: {labels}"]


def check_trackers(config: Config) -> list[str]:
    """Check that the client libraries of the configured trackers and of OTLP are installed, without importing them.

    Raises:
        ConfigError: A library is not installed.
    """
    for kind in (tracker.kind for tracker in config.monitor.trackers):
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(f"monitor.trackers: {kind} is not installed: pip install 'trinity-mq[{kind}]'")
    if config.monitor.otlp is not None and importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("monitor.otlp: opentelemetry is not installed: pip install 'trinity-mq[otel]'")
    return []
