"""The whole configuration of a run, and the checks across its sections."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from trinity_mq.config.agents import (
    ExplorerConfig,
    MonitorConfig,
    OperatorsConfig,
    RunnerConfig,
    SupervisorConfig,
    TrainerConfig,
)
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.algorithm.checks import algorithm_problems
from trinity_mq.config.algorithm.needs import components, needs
from trinity_mq.config.algorithm.pieces import LogLinear, LossConfig, Reduction
from trinity_mq.config.algorithm.translate import move_critic_settings
from trinity_mq.config.base import Section, expand_user
from trinity_mq.config.buffer import BufferConfig
from trinity_mq.config.bus import PUBLISH_TIMEOUT, BrokerConfig
from trinity_mq.config.devices import DevicesConfig, device_problems
from trinity_mq.config.engines import engine_row
from trinity_mq.config.model import ModelConfig
from trinity_mq.config.modes.gateway import GatewayConfig
from trinity_mq.config.modes.mode import (
    TRAINING_MODES,
    BenchConfig,
    Mode,
    SourceConfig,
    with_bench_folder,
    with_tap_mode,
)
from trinity_mq.config.outsiders import OutsidersConfig
from trinity_mq.config.registered import take_registered_names
from trinity_mq.config.sync import SyncConfig
from trinity_mq.roles import ROLES

STOP_SECONDS = 10.0
"""Upper bound in seconds for stopping a workflow after its timeout."""

SCHEMAS = {"sft": {"ce"}, "cpt": {"ce"}, "dpo": {"pair"}, "experience": {"rl", "ref_kl", "ce"}}
"""Loss components by record schema: at least one of them must have a weight."""
FITTING = {"sft": ("sft", "sft_is", "sft_phi"), "cpt": ("cpt",), "dpo": ("dpo", "ipo_pref"), "experience": ("grpo",)}
"""Suggested presets by record schema."""

MANIFEST_RESERVE_BYTES = 16 * 1024
"""Bytes of a manifest that are reserved for its metrics and names."""

TRUNCATING = frozenset(
    ["top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]
)
"""Sampling parameters that change the sampled distribution, so that the recorded logprobs do not belong to it."""


def _compares_with_sampler(loss: LossConfig) -> bool:
    """Return whether a loss takes into account that another policy may have sampled the data."""
    surrogate = loss.surrogate
    has_no_ratio = isinstance(surrogate, LogLinear) and surrogate.weight != "ratio" and surrogate.keep == "all"
    return bool(loss.correction) or not (has_no_ratio or loss.ratio.kind == "self")


def manifest_bytes(slices: int, runs: int) -> int:
    """Return an upper bound of the bytes in a batch's manifest for a number of slices and the total number of their
    runs.
    """
    return 96 * slices + 5 * runs


def batch_bytes(runs: int, prompt: int, response: int) -> int:
    """Return the bytes of a processed batch if every response reaches its limit: 21 bytes for each token of a response
    and 300 for each experience.

    Args:
        runs: Number of experiences.
        prompt: Maximum tokens of a prompt. On average a prompt has half of them, with 8 bytes each.
        response: Maximum tokens of a response.
    """
    return runs * (300 + 8 * prompt // 2 + 21 * response)


def slice_hold_seconds(slice_timeout: float) -> float:
    """Return an upper bound of the seconds for which a runner holds a slice: its work, its end and its publishes."""
    return slice_timeout + STOP_SECONDS + 2 * PUBLISH_TIMEOUT


_SECTION_CHECKS: list[Callable[[Config], Iterator[str]]] = []
"""Checks between the sections of a configuration, in order."""


SLEEPING_ENGINES = ("transformers", "vllm")
"""Engines that can free the memory of their card while a trainer uses it."""


def _section_check(check: Callable[[Config], Iterator[str]]) -> Callable[[Config], Iterator[str]]:
    """Register a check that yields the problems of sections that do not fit together."""
    _SECTION_CHECKS.append(check)
    return check


class Config(Section):
    """The settings of one run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9-]{1,40}$")
    """Name of the run. It is part of every name on the broker, which many runs may share."""
    run_dir: str = ""
    """Folder of checkpoints, logs, metrics and state. Empty: ``runs/<name>``."""
    mode: Mode = "both"
    """Kind of the run. ``both``: rolls out and trains. ``train``: trains on the records of
    ``buffer.trainer_input.experience_buffer``, or on the rollouts of another run (``source.tap``), without explorer,
    runners and engines. ``explore``: rolls out and writes the experiences to ``buffer.explorer_output``; the model does
    not change. ``bench``: evaluates the checkpoints of a run, see ``bench``. ``serve``: answers agents through a
    gateway, and trains on their sessions and rewards."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task order, of sampling and of a tiny model's weights."""
    plugin_dirs: tuple[str, ...] = ()
    """Folders of modules that every agent can import: a workflow, reward function or operator in ``my_file.py`` has the
    dotted path ``my_file.Name``. Relative folders start at the working directory."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    model: ModelConfig
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    source: SourceConfig = Field(default_factory=SourceConfig)
    explorer: ExplorerConfig = Field(default_factory=ExplorerConfig)
    runner: RunnerConfig = Field(default_factory=RunnerConfig)
    operator: OperatorsConfig = Field(default_factory=OperatorsConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    synchronizer: SyncConfig = Field(default_factory=SyncConfig)
    devices: DevicesConfig = Field(default_factory=DevicesConfig)
    broker: BrokerConfig = Field(default_factory=BrokerConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    supervisor: SupervisorConfig = Field(default_factory=SupervisorConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    outsiders: OutsidersConfig = Field(default_factory=OutsidersConfig)

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, data: Any) -> Any:
        """Translate four kinds of settings: replace names that modules in ``plugin_dirs`` register, move the critic
        settings of Trinity-RFT to ``algorithm.critic``, give an evaluation its own name and folder, and set mode train
        if ``source.tap`` is set.
        """
        if not isinstance(data, dict):
            return data
        return with_tap_mode(with_bench_folder(move_critic_settings(take_registered_names(data))))

    @model_validator(mode="after")
    def _check_sections(self, info: ValidationInfo) -> Config:
        """Run all checks between sections. If the validation has a context, append the problems to its list
        ``problems`` instead of raising an error.
        """
        problems = [problem for check in _SECTION_CHECKS for problem in check(self)]
        if problems and info.context is None:
            raise ValueError("\n".join(problems))
        if info.context is not None:
            info.context["problems"] += problems
        return self

    @field_validator("run_dir")
    @classmethod
    def _expand(cls, value: str) -> str:
        return str(expand_user(value)) if value else value

    @property
    def path(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name}")

    @property
    def hold_seconds(self) -> Mapping[str, float]:
        """Upper bounds of the seconds for which a slice or a batch is held: the sum of work, waits and publishes."""
        publish = self.broker.publish_timeout
        return {
            "slice": slice_hold_seconds(self.explorer.slice_timeout),
            "batch": self.explorer.operator_deadline + self.operator.timeout + 3 * publish,
        }

    @_section_check
    def _check_hold_times(self) -> Iterator[str]:
        explorer, publish = self.explorer, f"{self.broker.publish_timeout:g} s to publish"
        sums = {
            "slice": f"explorer.max_timeout {explorer.max_timeout:g} s x {explorer.max_retry_times + 1} tries, "
            f"{STOP_SECONDS:g} s to end it, 2 x {publish}",
            "batch": f"explorer.operator_deadline {explorer.operator_deadline:g} s, operator.timeout "
            f"{self.operator.timeout:g} s, 3 x {publish}",
        }
        for kind, seconds in self.hold_seconds.items():
            if seconds >= self.broker.consumer_timeout:
                yield (
                    f"an agent may hold a {kind} for {seconds:g} s ({sums[kind]}), and broker.consumer_timeout is "
                    f"{self.broker.consumer_timeout:g} s, after which the broker takes it back: raise that, or lower "
                    "the others"
                )

    @_section_check
    def _reviews(self) -> Iterator[str]:
        waits, limit = self.operator.review_seconds, self.explorer.stall_timeout
        if waits >= limit:
            yield (
                f"human_review may wait {waits:g} s for people, and explorer.stall_timeout ends a run in which nothing "
                f"has moved for {limit:g} s: raise that, or lower seconds"
            )

    @_section_check
    def _manifest(self) -> Iterator[str]:
        tasks, runs, limit = self.largest_batch, self.algorithm.repeat_times, self.broker.max_message_bytes
        slices = tasks * math.ceil(runs / (self.explorer.max_repeat_times_per_runner or runs))
        if (size := manifest_bytes(slices, tasks * runs) + MANIFEST_RESERVE_BYTES) > limit:
            refill = f" with explorer.refill.max {self.explorer.refill.max:g}" if self.max_refill else ""
            yield (
                f"buffer.batch_size {self.buffer.batch_size}{refill} makes batches of {slices} slices, whose manifest "
                f"takes up to {size} bytes; broker.max_message_bytes is {limit}. Lower batch_size, raise "
                "explorer.max_repeat_times_per_runner, or raise max_message_bytes (RabbitMQ 4 takes 16 MiB)"
            )

    @_section_check
    def _trainer_input(self) -> Iterator[str]:
        if self.mode == "bench":  # the evaluated run may have been trained in any mode
            return
        data = self.buffer.trainer_input.experience_buffer
        where = "buffer.trainer_input.experience_buffer"
        if self.mode == "train" and not data.storage.holds_records and not self.source.tap:
            yield (
                f"mode is train and {where}.storage_type stream, to which no agent would write: set it to file, "
                "huggingface or synthetic, with a path; or mode to both; or source.tap to the run to train on"
            )
            return
        if self.mode != "train" and data.storage.holds_records:
            yield (
                f"{where}.storage_type is {data.storage_type} and mode {self.mode}, in which the trainer trains on "
                "rollouts: set mode to train, or leave the section out"
            )
        if self.mode == "train" and self.trainer.batches_per_step != 1:
            yield (
                f"trainer.batches_per_step is {self.trainer.batches_per_step} in mode train, where a batch is as large "
                "as buffer.batch_size says: raise that instead"
            )
        experts = self.buffer.trainer_input.auxiliary_buffers
        if experts and self.mode not in {"both", "serve"}:
            yield (
                f"buffer.trainer_input.auxiliary_buffers has {', '.join(experts)} in mode {self.mode}, and experts "
                "are added to rollouts that are trained on: set mode to both, or leave them out"
            )
        elif experts and "ce" not in components(self.algorithm):
            yield (
                f"buffer.trainer_input.auxiliary_buffers has {', '.join(experts)}, and algorithm_type "
                f"{self.algorithm.algorithm_type} imitates nothing: take mix or mix_chord, or give "
                "algorithm.weights.ce a weight"
            )
        if self.mode == "explore" and self.trainer.nproc > 1:
            yield f"trainer.nproc is {self.trainer.nproc} in mode explore, which trains nothing: leave it at 1"
        needed_components = SCHEMAS.get(data.schema_type, {"ce", "pair"})
        if self.mode == "train" and not needed_components & components(self.algorithm):
            yield (
                f"{where}.schema_type is {data.schema_type}, and algorithm_type {self.algorithm.algorithm_type} has no "
                f"loss for it: it gives no weight to {' or '.join(sorted(needed_components))}. Fitting presets: "
                f"{', '.join(FITTING.get(data.schema_type, FITTING['sft']))}"
            )

    @_section_check
    def _source(self) -> Iterator[str]:
        tapped, loss, data = self.source.tap, self.algorithm, self.buffer.trainer_input.experience_buffer
        if not tapped or self.mode == "bench":
            return
        if self.mode != "train":
            yield (
                f"source.tap is {tapped!r} in mode {self.mode}, which makes its own rollouts: set mode to train, or "
                "leave source.tap out"
            )
            return
        if data.storage.holds_records:
            yield (
                f"source.tap is {tapped!r} and buffer.trainer_input.experience_buffer.storage_type "
                f"{data.storage_type}: a run trains on one of the two, leave the other out"
            )
            return
        if tapped == self.name:
            yield f"source.tap is {tapped!r}, the name of this run itself: give this run another name"
        if "rl" in components(loss) and not _compares_with_sampler(loss):
            yield (
                f"source.tap is {tapped!r}, and algorithm_type {loss.algorithm_type} does not compare the policy with "
                "the policy that sampled: answers of another policy would count as its own. Take an algorithm with a "
                "ratio to the sampler, such as grpo, or set algorithm.correction, for example [{kind: weight}]"
            )
        if "staleness" in needs(loss, dict.fromkeys(components(loss), 1.0)):
            yield (
                f"source.tap is {tapped!r}, and algorithm_type {loss.algorithm_type} weighs tokens by their age in "
                "train steps, which is not known for tokens of another run: take algorithm.anchor mu or old, and no "
                "correction of kind staleness"
            )
        if self.trainer.guard.max_mismatch is not None:
            yield (
                f"source.tap is {tapped!r}, and trainer.guard.max_mismatch {self.trainer.guard.max_mismatch:g}: the "
                "sampler is another policy, so any mismatch is normal. Leave trainer.guard.max_mismatch out"
            )

    @_section_check
    def _replay(self) -> Iterator[str]:
        replay, loss = self.buffer.trainer_input.replay, self.algorithm
        if not replay.share:
            return
        where = f"buffer.trainer_input.replay.share is {replay.share:g}"
        if self.mode not in {"both", "serve"}:
            yield f"{where} in mode {self.mode}, and only rollouts that are trained on can be replayed"
        elif not _compares_with_sampler(loss):
            yield (
                f"{where}, and algorithm_type {loss.algorithm_type} does not compare the policy with the policy that "
                f"sampled: groups up to {replay.max_age} train steps old would count as fresh. Take an algorithm with "
                "a ratio, such as grpo, or add algorithm.correction"
            )

    @_section_check
    def _bench(self) -> Iterator[str]:
        if self.mode != "bench":
            return
        if not self.buffer.eval_tasksets:
            yield "mode is bench and buffer.eval_tasksets is empty: name at least one taskset to evaluate on"
        if self.trainer.nproc > 1:
            yield f"trainer.nproc is {self.trainer.nproc} in mode bench, which trains nothing: leave it at 1"

    @_section_check
    def _serve(self) -> Iterator[str]:
        if self.mode != "serve":
            return
        gateway, broker = self.gateway, self.broker
        if 4 * gateway.max_kept_bytes > broker.sessions_max_bytes:
            yield (
                f"gateway.max_kept_bytes is {gateway.max_kept_bytes}, more than a quarter of broker.sessions_max_bytes "
                f"{broker.sessions_max_bytes}: sessions that wait would be lost with the stream's beginning. Lower the "
                "first or raise the second"
            )
        if self.accepts_any_age and not _compares_with_sampler(self.algorithm):
            yield (
                f"mode is serve, and algorithm_type {self.algorithm.algorithm_type} does not compare the policy with "
                "the policy that sampled: sessions whose rewards are late would count as fresh. Take an algorithm "
                "with a ratio, such as grpo, add algorithm.correction, or set synchronizer.max_staleness"
            )
        compares, size = self.algorithm.estimator.compares_runs, gateway.group_size
        if size is not None and not compares:
            yield (
                f"gateway.group_size is {size}, and algorithm_type {self.algorithm.algorithm_type} compares no "
                "sessions with each other: leave it out, or take an algorithm that does, such as grpo"
            )
        elif size is not None and size < self.algorithm.effective_min_group_runs:
            yield (
                f"gateway.group_size is {size}, less than algorithm.min_group_runs "
                f"{self.algorithm.effective_min_group_runs}: every group would be dropped"
            )

    @_section_check
    def _check_batches_per_step(self) -> Iterator[str]:
        together, sync = self.trainer.batches_per_step, self.synchronizer
        if sync.sync_style == "fixed" and sync.sync_interval % together:
            yield (
                f"trainer.batches_per_step is {together}, which does not divide synchronizer.sync_interval "
                f"{sync.sync_interval}: weights would be due in the middle of a step. Choose one that divides it"
            )
        if sync.sync_style != "fixed" and together > sync.pipeline_depth + 1:
            yield (
                f"trainer.batches_per_step is {together}, but the explorer is at most synchronizer.pipeline_depth + 1 "
                f"= {sync.pipeline_depth + 1} batches ahead: no step would ever begin. Raise pipeline_depth to "
                f"{together - 1}"
            )

    @_section_check
    def _ranks(self) -> Iterator[str]:
        if self.trainer.nproc > 1 and (reason := self.sharding_obstacle):
            yield f"trainer.nproc is {self.trainer.nproc}, but {reason}"

    @_section_check
    def _devices(self) -> Iterator[str]:
        on_gpus = self.model.device != "cpu"
        yield from device_problems(self.devices, self.trainer, self.explorer, computes_on_gpus=on_gpus)

    @_section_check
    def _colocated(self) -> Iterator[str]:
        if self.synchronizer.colocated and (reason := self._colocation_obstacle):
            yield f"synchronizer.colocated is true, but {reason}"

    @property
    def _colocation_obstacle(self) -> str | None:
        """The reason why trainer and engines cannot share a card in turns, with a remedy; None if they can."""
        rollout, sync, lora = self.explorer.rollout_model, self.synchronizer, self.model.lora
        if self.mode != "both":
            return f"mode is {self.mode}: only in mode both do a trainer and engines take turns; leave it out"
        if self.trainer.nproc > 1:
            return (
                f"trainer.nproc is {self.trainer.nproc}, and only the state of a single process can leave the card; "
                "set trainer.nproc to 1, or give engines and trainer separate cards"
            )
        if sync.sync_method == "collective" and sync.backend == "nccl":
            return "synchronizer.backend is nccl, which needs a separate card for each side; set it to gloo"
        if rollout.engine not in SLEEPING_ENGINES:
            return (
                f"explorer.rollout_model.engine is {rollout.engine}, which cannot sleep; use "
                f"{' or '.join(SLEEPING_ENGINES)}"
            )
        if rollout.engine == "transformers" and sync.effective_pause_mode == "keep":
            return (
                "requests in flight continue after a pause (pause_mode keep, the default of fully_async), and the "
                "transformers engine would keep their cache on the card; set synchronizer.pause_mode to wait or abort"
            )
        if lora is not None and (lora.sync == "adapter" or lora.quantization):
            return (
                "model.lora.sync is adapter or model.lora.quantization is set, whose weights cannot leave the card; "
                "set model.lora.sync to merged and leave quantization out"
            )
        return None

    @_section_check
    def _lora(self) -> Iterator[str]:
        lora, engine = self.model.lora, self.explorer.rollout_model.engine
        if lora is None:
            return
        if lora.sync == "adapter" and not engine_row(engine).takes_adapters:
            yield (
                f"model.lora.sync is adapter, and explorer.rollout_model.engine is {engine}: only vllm takes an "
                "adapter in addition to its model. Set model.lora.sync to merged, or the engine to vllm"
            )
        if lora.quantization and lora.sync == "adapter":
            yield (
                f"model.lora.quantization is {lora.quantization} and model.lora.sync is adapter: the engine would "
                "apply the adapter to weights that are not quantized, which is a different model. Set model.lora.sync "
                "to merged"
            )
        if lora.quantization and self.trainer.nproc > 1:
            yield (
                f"model.lora.quantization is {lora.quantization} and trainer.nproc {self.trainer.nproc}: quantized "
                "weights cannot be sharded here. Take one process, or leave quantization out"
            )
        if (update := self.algorithm.reference.update) != "never":
            yield (
                f"algorithm.reference.update is {update}, and with model.lora the reference is the model without its "
                "adapters, which does not move: set algorithm.reference.update to never"
            )

    @property
    def agent_counts(self) -> dict[str, int]:
        """Number of agents of each role that ``trinity-mq run`` starts, in starting order."""
        rows = {role: row for role, row in ROLES.items() if self.mode in row.modes}
        return {role: attrgetter(row.number)(self) if row.number else 1 for role, row in rows.items()}

    @property
    def leader(self) -> str:
        """Name of the agent whose end is the end of the run: the first in starting order."""
        return f"{next(iter(self.agent_counts))}-0"

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of a policy engine in a broadcast of weights."""
        rollout, lora = self.explorer.rollout_model, self.model.lora
        takes_adapter = lora is not None and lora.sync == "adapter"
        by_device = engine_row(rollout.engine).receives_on_each_device and not takes_adapter
        return rollout.tensor_parallel_size if by_device else 1

    @property
    def sharding_obstacle(self) -> str | None:
        """The reason why a train step cannot be shared among several processes, with a remedy; None if it can."""
        optimizer = self.algorithm.optimizer
        if optimizer.optimizer_type not in {"adamw", "sgd"}:
            return (
                f"algorithm.optimizer.optimizer_type {optimizer.optimizer_type} needs whole matrices, and each process "
                "has a part of them: take adamw or sgd, or one process"
            )
        for name, section in (("optimizer", optimizer), ("reference", self.algorithm.reference)):
            if section.offload:
                return (
                    f"algorithm.{name}.offload is not supported for sharded models, which take less memory anyway: "
                    "leave it out, or take one process"
                )
        return None

    @_section_check
    def _sampling(self) -> Iterator[str]:
        if self.mode in {"train", "bench"}:
            return
        used = sorted(
            {name for taskset in self.buffer.training_tasksets for name in TRUNCATING & set(taskset.rollout_args)}
        )
        if self.explorer.rollout_model.top_p < 1:
            used.append("explorer.rollout_model.top_p")
        if used and not self.algorithm.allow_truncated_sampling:
            yield (
                f"training rollouts use {', '.join(used)}: their logprobs are then not those of the sampled "
                "distribution. Remove it, or set algorithm.allow_truncated_sampling=true if that is what you want"
            )

    @_section_check
    def _answer_lengths(self) -> Iterator[str]:
        default, most = self.explorer.rollout_model.min_response_tokens, self.model.max_response_tokens
        places = [("explorer.rollout_model.min_response_tokens", default, most)]
        for taskset in (*self.buffer.training_tasksets, *self.buffer.eval_tasksets):
            changes = {key: value for key, value in taskset.rollout_args.items() if key in ("min_tokens", "max_tokens")}
            if changes:
                limits = {"min_tokens": default, "max_tokens": most, **changes}
                places.append((f"min_tokens of taskset {taskset.name!r}", limits["min_tokens"], limits["max_tokens"]))
        for name, least, most in places:
            if isinstance(least, int) and isinstance(most, int) and least > most:
                yield f"{name} is {least}, more than the {most} tokens that an answer may have; lower it"

    @_section_check
    def _algorithm(self) -> Iterator[str]:
        staleness, longest = self.synchronizer.effective_max_staleness, self.model.max_response_tokens
        replay = self.buffer.trainer_input.replay
        staleness = max(staleness, replay.max_age) if replay.share else staleness
        if self.source.tap and self.mode == "train":
            staleness = max(staleness, self.buffer.total_steps or 1)  # the sampler is the policy of another run
        yield from algorithm_problems(self.algorithm, staleness, longest)

    @_section_check
    def _check_model_names(self) -> Iterator[str]:
        names = [model.name for model in self.explorer.auxiliary_models]
        if any("model" in taskset.rollout_args for taskset in self.buffer.training_tasksets):
            yield (
                "buffer.taskset.rollout_args.model: training tasks are answered by the policy that is trained; "
                "remove it. Only evaluation tasksets may name an auxiliary model"
            )
        for taskset in self.buffer.eval_tasksets:
            name = taskset.rollout_args.get("model")
            if name is not None and name not in names:
                yield (
                    f"eval taskset {taskset.name!r}: rollout_args.model is {name!r}, wanted one of "
                    f"explorer.auxiliary_models: {', '.join(names) or 'there are none'}"
                )

    @_section_check
    def _retention(self) -> Iterator[str]:
        held = (self.trainer.save_interval + self.explorer.max_open_batches) * self.estimated_batch_bytes
        if held > self.broker.ready_max_bytes:
            yield (
                f"trainer.save_interval {self.trainer.save_interval} + explorer.max_open_batches "
                f"{self.explorer.max_open_batches} batches may be {held // 2**20} MiB, over broker.ready_max_bytes "
                f"{self.broker.ready_max_bytes // 2**20} MiB: a restarted trainer would not find them all. "
                "Save more often or keep more"
            )

    @property
    def accepts_any_age(self) -> bool:
        """Whether the trainer accepts data of any age."""
        return self.mode == "train" or (self.mode == "serve" and self.synchronizer.max_staleness is None)

    @property
    def chain_digest(self) -> str:
        """Digest of the settings that determine how operators change a batch: ``operator.operators`` and the estimator.
        Defaults are left out, so that a release with additional settings has the same digest.
        """
        parts = (self.algorithm.estimator, *self.operator.operators)
        chain = [part.model_dump(mode="json", exclude_defaults=True) for part in parts]
        return hashlib.sha256(json.dumps(chain, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def max_refill(self) -> int:
        """Maximum number of tasks in a batch that replace groups dropped by operators from earlier batches."""
        return math.ceil(self.explorer.refill.max * self.buffer.batch_size)

    @property
    def largest_batch(self) -> int:
        """Maximum number of tasks in a batch."""
        return self.buffer.batch_size + self.max_refill

    @property
    def reduction(self) -> Reduction:
        """``algorithm.reduction`` with its constant filled in."""
        reduction = self.algorithm.reduction
        if reduction.constant is not None or reduction.kind not in {"constant", "sequence_constant"}:
            return reduction
        return Reduction(kind=reduction.kind, constant=float(self.model.max_response_tokens))

    @property
    def train_steps(self) -> int | None:
        """Number of train steps of the run if each batch is trained on; None if the taskset decides."""
        batches, together = self.buffer.total_steps, self.trainer.batches_per_step
        return None if batches is None else -(-batches // together)

    @property
    def learning_rate_falls(self) -> bool:
        """Whether the learning rate falls: the run trains, the rate has a schedule, and the trainer knows the number of
        train steps when it starts, from ``buffer.total_steps`` or from the records of mode ``train``.
        """
        has_length = self.train_steps is not None or (self.mode == "train" and not self.source.tap)
        has_schedule = self.algorithm.optimizer.lr_scheduler_type != "constant"
        return self.mode in TRAINING_MODES and has_schedule and has_length

    @property
    def estimated_batch_bytes(self) -> int:
        """Maximum bytes of a processed batch. Batches with replacement tasks have the same size on average, since they
        replace groups that were dropped.
        """
        runs = self.buffer.batch_size * self.algorithm.repeat_times
        return batch_bytes(runs, self.model.max_prompt_tokens, self.model.max_response_tokens)
