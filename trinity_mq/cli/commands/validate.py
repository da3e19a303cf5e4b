"""``trinity-mq validate``: checks a configuration without starting anything."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from trinity_mq.cli.arguments import add_target
from trinity_mq.cli.long_prompts import count_long_prompts
from trinity_mq.cli.target import configuration, staged
from trinity_mq.config import Config, ConfigError, ExperienceBufferConfig, Stage, TasksetConfig
from trinity_mq.config.algorithm.pieces import Plugin
from trinity_mq.config.estimators import EstimatorPlugin
from trinity_mq.config.loading.stages import find_stage
from trinity_mq.data import open_taskset
from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import read_records
from trinity_mq.messages import DecodeError
from trinity_mq.models.model_folder import has_chat_template, known_folder
from trinity_mq.rewards import RewardError, UnknownNameError, create_reward, find_reward
from trinity_mq.runtime.errors import FatalError, described
from trinity_mq.runtime.plugins import add_plugins
from trinity_mq.transport.blobs import StoreUnavailable, open_store

PLAIN_WORKFLOWS = frozenset({"simple_workflow", "math_workflow"})
"""Built-in workflows, each also as ``async_``, that need no arguments and no recorded calls."""
GREEDY_WORKFLOWS = PLAIN_WORKFLOWS | {"math_boxed_workflow", "tool_call_workflow"}
"""Those that can make a greedy run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq validate``."""
    add_target(parser)
    parser.add_argument("--stage", metavar="NAME", help="check this stage alone, of a file that describes several")


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration, or every stage of it, and print a line on each part."""
    stages = staged(arguments)
    if arguments.stage is not None and not stages:
        raise ConfigError(f"--stage {arguments.stage}: {arguments.target} holds no stages; leave it out")
    for stage in [find_stage(stages, arguments.stage)] if arguments.stage else stages:
        has_model = stage.begins_with is None or _is_trained(stage)
        lines = check_all(stage.config, needs_model=has_model)
        lines += count_long_prompts(stage.config, _tasksets(stage.config)) if has_model else []
        _print_valid(f"{arguments.target}: stage {stage.name}:", stage.config, lines)
    if not stages:
        config = configuration(arguments)
        lines = [*check_all(config), *count_long_prompts(config, _tasksets(config))]
        _print_valid(f"{arguments.target}:", config, lines)
    return 0


def _is_trained(stage: Stage) -> bool:
    return stage.config.model.model_path is not None and Path(stage.config.model.model_path).is_dir()


def _print_valid(where: str, config: Config, lines: Sequence[str]) -> None:
    for line in lines:
        print(line)
    print(f"{where} run {config.name!r} is valid; it would use {config.path}")


def check_all(config: Config, *, needs_model: bool = True) -> list[str]:
    """Check all that can be known before a run starts on this machine; return lines about its parts.

    Args:
        config: The configuration.
        needs_model: Whether the policy's model must be there; not where an earlier stage is to train it.

    Raises:
        ConfigError: All that is wrong, one line each.
    """
    lines, problems = [], []
    for check in (
        check_tasksets,
        check_greedy_runs,
        check_workflows,
        check_outsiders,
        check_operators,
        check_algorithm,
        check_models,
        check_devices,
        check_optimizer,
        check_lora,
        check_blob_store,
        check_checkpoints,
        check_trackers,
    ):
        if check is check_models and not needs_model:
            continue
        try:
            lines += check(config)
        except (ConfigError, TasksetError, FatalError) as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return lines


@contextlib.contextmanager
def _calling(what: str, *explained: type[Exception]) -> Iterator[None]:
    """Make an error of the user's own code, called in the ``with`` block, one that names the code and the line; errors
    that say by themselves what is wrong, such as ``explained``, stay.
    """
    stays: tuple[type[Exception], ...] = (ConfigError, TasksetError, FatalError, *explained)
    try:
        yield
    except stays:
        raise
    except (Exception, SystemExit) as error:  # whatever that code does
        raise ConfigError(f"{what} cannot be used: {described(error)}") from error


def imports_torch(config: Config) -> bool:
    """Return whether :func:`check_all` has to import torch for this configuration."""
    on_devices = config.model.device == "cuda" or _is_over_nccl(config)
    needed = (
        bool(config.operator.operators)
        or bool(_own_pieces(config))
        or on_devices
        or _has_rare_optimizer(config)
        or bool(config.model.lora)
    )
    return needed or bool(config.outsiders.workflows) or not all(map(_is_plain, _tasksets(config)))


def _tasksets(config: Config) -> tuple[TasksetConfig, ...]:
    evaluated = config.buffer.eval_tasksets
    return {"train": (), "bench": evaluated}.get(config.mode, (*config.buffer.training_tasksets, *evaluated))


def _is_plain(taskset: TasksetConfig) -> bool:
    return taskset.workflow.removeprefix("async_") in PLAIN_WORKFLOWS and not taskset.workflow_args


def _own_pieces(config: Config) -> list[Plugin | EstimatorPlugin]:
    """Return the parts of the algorithm that are functions of the user's own."""
    algorithm = config.algorithm
    pieces = (algorithm.surrogate, *algorithm.correction, algorithm.estimator)
    return [piece for piece in pieces if isinstance(piece, Plugin | EstimatorPlugin)]


def _has_rare_optimizer(config: Config) -> bool:
    """Return whether the optimizer may need what is not installed."""
    return config.algorithm.optimizer.optimizer_type in {"adamw_8bit", "muon"}


def _is_over_nccl(config: Config) -> bool:
    return config.synchronizer.sync_method == "collective" and config.synchronizer.backend == "nccl"


def check_tasksets(config: Config) -> list[str]:
    """Open every taskset once, so that an unreadable one shows before processes start; return a line on each.

    Raises:
        TasksetError: One cannot be read.
        ConfigError: Its reward function is not known, or does not take its arguments.
        FatalError: A folder of ``plugin_dirs`` cannot be used.
    """
    add_plugins(config.plugin_dirs)
    if config.mode == "train" and config.source.tap:
        return [_check_tapped(config)]
    if config.mode == "train":
        return [_check_records(config.buffer.trainer_input.experience_buffer)]
    found = []
    for taskset in _tasksets(config):
        try:
            if taskset.reward_fn:  # else the workflow brings its own
                with _calling(f"taskset {taskset.name!r}: reward function {taskset.reward_fn!r}", RewardError):
                    create_reward(taskset.reward_fn, taskset.reward_fn_args)
        except (UnknownNameError, RewardError) as error:
            raise ConfigError(f"taskset {taskset.name!r}: {error}") from error
        if taskset.storage_type == "queue":
            found.append(f"taskset {taskset.name!r}: tasks submitted from outside")
        else:
            with _calling(f"taskset {taskset.name!r}: selector {taskset.effective_selector.selector_type!r}"):
                tasks = open_taskset(taskset, seed=config.seed, max_bytes=config.broker.max_task_bytes)
            kind = taskset.effective_selector.selector_type
            selector = "" if kind == taskset.selector else f", chosen by {kind}"
            found.append(f"taskset {taskset.name!r}: {len(tasks)} tasks from {taskset.path}{selector}")
    return found


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
    rows, _ = read_records(data, data.required_keys)
    return f"training data {data.name!r}: {len(rows)} records from {data.path}"


def check_greedy_runs(config: Config) -> list[str]:
    """Check that built-in workflows make the greedy run that the estimator compares with, and only for such a one.

    Raises:
        ConfigError: They do not, or nothing would look at it.
    """
    for taskset in config.buffer.training_tasksets:
        _check_greedy(config, taskset)
    return []


def _check_greedy(config: Config, taskset: TasksetConfig) -> None:
    estimator = config.algorithm.estimator
    is_made = bool(taskset.workflow_args.get("greedy_baseline"))
    is_wanted = getattr(estimator, "baseline", None) == "greedy"
    if is_wanted and not is_made and taskset.workflow.removeprefix("async_") in GREEDY_WORKFLOWS:
        raise ConfigError(
            f"algorithm {config.algorithm.algorithm_type} compares the runs of a task with a greedy one, and workflow "
            f"{taskset.workflow!r} makes none; set buffer.taskset.workflow_args.greedy_baseline: true"
        )
    if is_made and not is_wanted:
        raise ConfigError(
            f"buffer.taskset.workflow_args.greedy_baseline is true, and the estimator of "
            f"{config.algorithm.algorithm_type} has no use for a greedy run, which is not trained on; remove it, or "
            "set algorithm.estimator.baseline: greedy"
        )


def check_workflows(config: Config) -> list[str]:
    """Import the workflow of every taskset; return a line on each that is the user's own.

    Raises:
        ConfigError: It is not known, cannot be imported, does not take its arguments, or records history, which is
            switched off.
    """
    own = []
    for taskset in _tasksets(config):
        if _is_plain(taskset):
            continue
        from trinity_mq.workflows import WORKFLOWS, TaskError, check_arguments, load_workflow
        from trinity_mq.workflows.builtin.simple import SimpleArguments
        from trinity_mq.workflows.builtin.tool_agent import ToolAgentArguments
        from trinity_mq.workflows.builtin.tools import Toolbox

        try:
            with _calling(f"taskset {taskset.name!r}: workflow {taskset.workflow!r}", TaskError):
                kind = load_workflow(taskset.workflow)
                takes = kind.arguments_kind or (SimpleArguments if taskset.workflow in WORKFLOWS else None)
                if takes is not None:
                    check_arguments(taskset.workflow_args, takes)
                if takes is not None and issubclass(takes, ToolAgentArguments):
                    Toolbox(taskset.workflow_args.get("tools", ()))
        except (UnknownNameError, TaskError) as error:
            raise ConfigError(f"taskset {taskset.name!r}: {error}") from error
        if kind.needs_history and not config.explorer.rollout_model.enable_history:
            raise ConfigError(
                f"taskset {taskset.name!r}: workflow {taskset.workflow!r} makes its experiences from recorded calls; "
                "set explorer.rollout_model.enable_history: true"
            )
        if taskset.workflow not in WORKFLOWS:
            own.append(f"taskset {taskset.name!r}: workflow {kind.__name__} from {inspect.getfile(kind)}")
    return own


def check_outsiders(config: Config) -> list[str]:
    """Look for the workflows and reward functions that outsiders may name.

    Raises:
        ConfigError: One is not known, or cannot be imported.
    """
    outsiders = config.outsiders
    try:
        if outsiders.workflows:
            from trinity_mq.workflows import load_workflow

            for name in outsiders.workflows:
                load_workflow(name)
        for name in outsiders.rewards:
            find_reward(name)
    except UnknownNameError as error:
        raise ConfigError(f"outsiders: {error}") from error
    return []


def check_operators(config: Config) -> list[str]:
    """Make the operators of the chain; return a line on them if there are any.

    Raises:
        ConfigError: One is not known, or does not take its arguments.
    """
    if not config.operator.operators:
        return []
    from trinity_mq.operators import OperatorConfigError, create_operators  # and torch with it

    for operator in config.operator.operators:
        try:
            with _calling(f"operator.operators: operator {operator.name!r} with args {operator.args!r}"):
                create_operators([operator])
        except (UnknownNameError, OperatorConfigError) as error:
            raise ConfigError(f"operator.operators: {error}") from error
    return [f"operators, before the advantage: {', '.join(operator.name for operator in config.operator.operators)}"]


def check_algorithm(config: Config) -> list[str]:
    """Import the parts of the loss, and the estimator, that are the user's own; return a line on each.

    Raises:
        ConfigError: A function cannot be imported, or does not take its arguments.
    """
    own = [] if config.mode == "bench" else _own_pieces(config)
    if not own:
        return []
    from trinity_mq.algorithms.estimators.plugin import plugin_function  # and torch with it
    from trinity_mq.algorithms.plugins import load_plugins

    try:
        load_plugins(config.algorithm)
        if isinstance(config.algorithm.estimator, EstimatorPlugin):
            plugin_function(config.algorithm.estimator)
    except FatalError as error:
        raise ConfigError(f"algorithm: {error}") from error
    return [f"algorithm: your own {piece.kind}" for piece in own]


def check_models(config: Config) -> list[str]:
    """Look for the folders of the models, without fetching or loading any; return a line on each that is to be fetched.

    Raises:
        ModelError: A folder is not there or is no model's.
        ConfigError: The model has no chat template, which a workflow needs.
    """
    found = []
    for model in (config.model, *(auxiliary.model for auxiliary in config.explorer.auxiliary_models)):
        if model is None or model.model_path is None:
            continue
        folder = known_folder(model.model_path)
        if folder is None:
            found.append(f"model {model.model_path}: a hub id, fetched when the run starts")
        elif model is config.model and not has_chat_template(folder):
            found += _check_without_template(config, f"model {model.model_path}")
    if config.model.tiny is not None and not config.model.tiny.chat_template:
        found += _check_without_template(config, "model.tiny")
    return found


def _check_without_template(config: Config, model: str) -> list[str]:
    from trinity_mq.workflows import WORKFLOWS  # and torch with it

    known = f"{model} has no chat template, so it answers no chat requests"
    for taskset in _tasksets(config):
        if taskset.storage_type != "queue" and taskset.workflow in WORKFLOWS:
            raise ConfigError(
                f"{known}, and workflow {taskset.workflow!r} makes them: use an instruction-tuned model, or put a "
                "chat_template.jinja into its folder"
            )
    return [known]


def check_devices(config: Config) -> list[str]:
    """Look for the devices and the software that engines, trainer and weight sync need on this machine.

    Raises:
        ConfigError: A device is not there.
        ModelError: vLLM is not installed, or in another version.
    """
    if config.explorer.rollout_model.engine == "vllm":
        from trinity_mq.models.engines.vllm.api import checked_version

        checked_version()
    over_nccl = _is_over_nccl(config)
    if config.model.device != "cuda" and not over_nccl:
        return []
    import torch
    from torch import distributed

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.model.device == "cuda" and not count:
        raise ConfigError("model.device is cuda, and torch sees no CUDA device here; use model.device=auto or cpu")
    if not over_nccl:
        return []
    missing = {
        "model.device is cpu": config.model.device == "cpu",
        "torch sees no GPU here": not count,
        "this torch is built without NCCL": not distributed.is_nccl_available(),
    }
    if why := next((words for words, holds in missing.items() if holds), None):
        raise ConfigError(
            f"synchronizer.backend is nccl, which sends weights between GPUs, and {why}; use synchronizer.backend=gloo"
        )
    members = 1 + config.explorer.rollout_model.engine_num
    enough = f"backend nccl: the trainer and each engine need a GPU of their own, {members} in all; here are {count}"
    return [enough] if count < members else []


def check_optimizer(config: Config) -> list[str]:
    """Look for the software that the optimizer needs.

    Raises:
        LearnerError: It is not installed.
    """
    if _has_rare_optimizer(config):
        from trinity_mq.training.optimizers import check_installed  # and torch with it

        check_installed(config.algorithm.optimizer)
    return []


def check_lora(config: Config) -> list[str]:
    """Look for the software that adapters need, and for the layers that get them.

    Raises:
        AdapterError: It is not installed, or the model has no such layers.
    """
    if config.model.lora is not None:
        from trinity_mq.training.model.lora import check_installed, check_targets  # and torch with it

        check_installed(config.model.lora)
        check_targets(config.model)
    return []


def check_blob_store(config: Config) -> list[str]:
    """Write, read and remove a small blob where a blob store is configured; return a line on it.

    Raises:
        ConfigError: One of that failed.
        FatalError: No library for it is installed.
    """
    store = open_store(config.broker, config.name)
    if store is None:
        return []
    try:
        reference = store.put(f"check/{uuid.uuid4().hex}", b"x")
        store.get(reference)
        store.delete("check")
    except (StoreUnavailable, DecodeError) as error:
        raise ConfigError(f"broker.blob_store: {error}") from error
    return [f"blob store {store.url}: can be written and read"]


def check_checkpoints(config: Config) -> list[str]:
    """Look for the checkpoints that mode ``bench`` evaluates; return a line on them.

    Raises:
        CheckpointError: There are none.
    """
    if config.mode != "bench":
        return []
    from trinity_mq.training.checkpoints.benchmarked import benchmarked

    labels = ", ".join(str(label) for label in benchmarked(config))
    return [f"checkpoints of {config.bench.run}, by batches: {labels}"]


def check_trackers(config: Config) -> list[str]:
    """Look for the libraries of the services that metrics and spans are sent to, without importing them.

    Raises:
        ConfigError: One is not installed.
    """
    for kind in (one.kind for one in config.monitor.trackers):
        if importlib.util.find_spec(kind) is None:
            raise ConfigError(f"monitor.trackers: {kind} is not installed: pip install 'trinity-mq[{kind}]'")
    if config.monitor.otlp is not None and importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("monitor.otlp: opentelemetry is not installed: pip install 'trinity-mq[otel]'")
    return []
