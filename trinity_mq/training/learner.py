"""The learner runs train steps in sequence, in its own thread."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn import Module

from trinity_mq.algorithms.class_losses import load_classes
from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.algorithms.plugins import has_classes, load_plugins
from trinity_mq.algorithms.scoring import Scores
from trinity_mq.config.algorithm.needs import needs, needs_reference
from trinity_mq.config.run import Config
from trinity_mq.config.threads import cpu_threads
from trinity_mq.engines.torch.parking import ParkedTensors
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.runtime.errors import DeviceMemoryError, FatalError, RestartRequested
from trinity_mq.runtime.gpu_memory import release_cached_memory, shares_gpu
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.sync.channels.buckets import gathered as whole_tensor
from trinity_mq.sync.channels.buckets import plan
from trinity_mq.telemetry.trace import span
from trinity_mq.training.advantages import AdvantageResult, Memory, trainer_advantages
from trinity_mq.training.checkpoints.checkpoint import DamagedCheckpointError, Writer
from trinity_mq.training.checkpoints.old_checkpoint import is_legacy, read_old_facts, read_old_parts
from trinity_mq.training.checkpoints.state import (
    HostCopies,
    LateTensors,
    Parts,
    StatePart,
    StoredRows,
    module_state,
    optimizer_part,
    optimizer_state,
    read_facts,
    read_parts,
    read_policy,
    stored_policy,
    write_index,
    write_parts,
    write_shard,
)
from trinity_mq.training.critic import CRITIC, CRITIC_OPTIMIZER, Critic, CriticTotals
from trinity_mq.training.guard import Guard
from trinity_mq.training.memory.estimate import Device, Measured, estimate
from trinity_mq.training.memory.measure import (
    PassLimit,
    card_of,
    choose_limit,
    describe_lack,
    measure_trained,
    remedies,
    stored_limit,
)
from trinity_mq.training.model.lora import weight_count
from trinity_mq.training.model.policy import LearnerError, ModelNotLoadedError, Policy, select_device
from trinity_mq.training.optimizers import learning_rate, make_optimizer, restore_state, set_learning_rate
from trinity_mq.training.packing import (
    IMITATED,
    PAIRED,
    SAMPLED,
    StepTokens,
    mask_nonfinite_logprobs,
    split,
    train_tokens,
)
from trinity_mq.training.parallel.ranks import FailedElsewhereError, Mailbox, RankCommand, RankError, Ranks
from trinity_mq.training.parallel.sharding import gathered
from trinity_mq.training.reference import Reference
from trinity_mq.training.stopwatch import Stopwatch
from trinity_mq.training.update import (
    StepLoss,
    StepTotals,
    compares_tokens,
    entropy_coefficient,
    length_metrics,
    optimizer_step,
    score,
    skipped_for,
    step_columns,
    token_metrics,
    tokens_of,
)

MODEL_FOLDER = "model"
"""Subfolder of a checkpoint that ``transformers`` can load."""

GATHER_BYTES = 256 * 2**20
"""Maximum bytes of the weights that a single command gathers for a weight sync. Rank 0 holds them until they are
read.
"""
AFTER_AN_ERROR = 30.0
"""Seconds that a rank waits for the next announcement of rank 0 after a failed command."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Learner(Protocol):
    """Interface between the trainer and the weight updates. A cancelled call finishes its work before it returns."""

    async def open(self, checkpoint: Path | None) -> None:
        """Load the first model, or everything that :meth:`save` wrote to the folder ``checkpoint``.

        Raises:
            DamagedCheckpointError: The checkpoint does not load; another checkpoint may load.
        """

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Run train step ``step_number`` (from 1) and return its metrics. All metrics are finite.

        ``actor/optimizer_steps`` counts the weight updates; 0 means that the weights did not change.
        """

    async def save(self, folder: Path) -> str | None:
        """Write everything that :meth:`open` needs into the existing folder, which holds no other checkpoint. Return
        the checksum of the weights, or None.
        """

    async def stage(self) -> Writer:
        """Copy the current state, and return a writer that writes the copy like :meth:`save` while later steps run. The
        writer is called before the next copy is made, or never.
        """

    async def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of every weight, always in the same order. Tied weights appear once."""

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights in the order of the manifest. They may be the live weights, so use them before the next
        step.
        """

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]`` under the current weights, at temperature 1."""

    async def close(self) -> None:
        """Wait for running work and release all resources."""


class TorchLearner:
    """Trains a Hugging Face causal language model. The models compute in one worker thread. Copies of their state are
    written in a second thread.
    """

    def __init__(self, config: Config, model_folder: Path, total_steps: int | None, ranks: Ranks | None = None) -> None:
        """Prepare the learner; :meth:`open` loads the models.

        Args:
            config: Configuration of the run. The learner uses its seed, algorithm, model and trainer sections.
            model_folder: Hugging Face folder of the first model. The tokenizer always comes from this folder.
            total_steps: Train steps of the run, for the decay of the learning rate and of the entropy weight. None: no
                decay.
            ranks: Ranks over which models are sharded. All methods are for rank 0, which announces each collective
                command to the other ranks. The other ranks call :meth:`follow`.
        """
        self._config = config
        self._ranks = ranks or Ranks()
        self._model_folder = model_folder
        self._total_steps = total_steps
        self._loaded: tuple[Policy, torch.optim.Optimizer] | None = None
        self.reference: Reference | None = None
        """Reference model, if the loss or the rewards need it."""
        self.critic: Critic | None = None
        """Critic, if the advantage estimator needs it."""
        self._memory = Memory()
        self._measured: dict[str, Measured] | None = None
        """Measured memory of the trained models; None until it is needed."""
        self._pass_limit: PassLimit | None = None
        """Size of a pass that was chosen for the GPU; None if the size is configured, or on a CPU."""
        self._has_trained = False
        """Whether this process has made a train step."""
        self._has_classes = False
        """Whether classes compute a part of the loss."""
        self._copies = HostCopies()
        self._parked = ParkedTensors()
        self._host_weights: dict[str, Tensor] = {}
        self._guard = Guard(config.trainer.guard)
        threads = cpu_threads(config, config.trainer.num_threads)
        # torch keeps the number of threads per calling thread, so each worker sets its own.
        self._pool = ThreadPoolExecutor(1, "learner", torch.set_num_threads, (threads,))
        self._writer_pool = ThreadPoolExecutor(1, "checkpoint-writer", torch.set_num_threads, (1,))
        self._mailbox: Mailbox | None = None
        self._copied = 0
        """On rank 0: number of the command that made the latest copy of the state; 0 after the copy was written or
        dropped."""
        self._writing: Future[None] | None = None

    async def open(self, checkpoint: Path | None) -> None:
        """Load the model, and the reference model and the critic where the algorithm needs them; both start as copies
        of the first model of the run. A checkpoint also restores their weights, the optimizers and the state carried
        across train steps.

        Raises:
            DamagedCheckpointError: The checkpoint does not load.
            LearnerError: The folder holds no loadable model, the device does not exist, or the reference differs from
                the reference of the checkpoint.
            FatalError: A loss plug-in cannot be used.
        """
        await self._lead("opening", lambda: self._lead_open(checkpoint))

    async def take_weights(self, checkpoint: Path | None) -> None:
        """Load the policy weights of another checkpoint, or of the first model (None), to serve them. Optimizer, critic
        and reference need not belong to these weights afterwards, so no train step may follow.

        Raises:
            DamagedCheckpointError: The checkpoint does not load.
        """
        await self._run(lambda: self._take_weights(checkpoint))

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Run one train step: ``epochs x mini_batches`` optimizer steps.

        An optimizer step that the guard rejects or that has no trained token is skipped and counted in
        ``actor/skipped_<reason>``; the weights do not change. Averages cover the applied steps and are absent if no
        step was applied. A train step that does not change the policy leaves role baselines, the coefficient of a KL in
        the rewards, and the reference unchanged. During the critic warm-up only the critic learns, and
        ``critic/optimizer_steps`` counts its updates.

        Args:
            experiences: Experiences with the fields that the loss needs, see
                :func:`trinity_mq.training.packing.train_tokens`.
            step_number: Number of the train step, from 1. It determines learning rate, entropy and component weights,
                mini-batches, token age and every random draw.

        Raises:
            ValueError: ``experiences`` is empty.
            TrainingStopped: The guard skipped too many optimizer steps in a row. Earlier optimizer steps of this train
                step may have been applied, so resume from a checkpoint.
        """
        batch = ExperienceBatch.of(experiences)
        if not batch:
            raise ValueError(
                f"train step {step_number} has no experiences: an empty batch is a skipped step, not a train step"
            )

        def traced() -> dict[str, float]:
            with span("train step", threads=True):
                body = batch.encode() if self._ranks.world > 1 else b""
                with self._command("step", body, number=step_number):
                    return self._step(batch, step_number)

        return await self._lead("train step", traced)

    async def save(self, folder: Path) -> str:
        """Write the state in parts, see :mod:`trinity_mq.training.checkpoints.state`. With ``trainer.export: every``
        also write ``model/``, which ``transformers`` loads. Return the checksum of the weights that engines receive.
        """
        if self._ranks.world > 1:
            parts, number = await self._lead("checkpoint", self._copy)
            return await run_to_end(self._writer_pool, lambda: self._write(folder, parts, number))
        live = await self._run(self._parts)
        return await self._run(lambda: self._write(folder, live, 0))

    async def stage(self) -> Writer:
        """Copy the state into host memory and return a writer that writes it like :meth:`save`, on a separate
        thread. Each rank copies and writes its own shards.
        """
        parts, number = await self._lead("checkpoint", self._copy)
        return lambda folder: run_to_end(self._writer_pool, lambda: self._write(folder, parts, number))

    async def export(self, folder: Path) -> None:
        """Write a folder that ``transformers`` loads, in float32."""

        def write() -> None:
            weights = None if self._ranks.world == 1 else self._lead_tensors()
            self.policy.save(folder, self._model_folder, weights)

        await self._lead("export", write)

    async def leave_device(self) -> None:
        """Move weights, optimizer state, reference and critic to host memory, and free the memory of the device.
        Gradients are dropped: the next step computes them again. Until :meth:`return_to_device`, only
        :meth:`manifest` may be called.
        """
        await self._run(lambda: self._parked.park(self._device_tensors()))

    async def return_to_device(self) -> None:
        """Move everything back to the device.

        Raises:
            DeviceMemoryError, RestartRequested: The device has too little free memory, as in a train step.
        """

        def unpark() -> None:
            with self._memory_advice("return to the device"):
                self._parked.unpark()

        await self._run(unpark)

    async def host_weights(self) -> list[tuple[str, Tensor]]:
        """Return a copy of :meth:`weights` in host memory. The next call overwrites it."""
        weights = await self.weights()

        @torch.no_grad()
        def copy() -> list[tuple[str, Tensor]]:
            before, self._host_weights = self._host_weights, {}
            with self._memory_advice("weight sync"):
                for name, tensor in weights:
                    whole = whole_tensor(tensor)
                    buffer = before.pop(name, None)
                    if buffer is None:
                        buffer = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                    self._host_weights[name] = buffer.copy_(whole)
            return list(self._host_weights.items())

        return await asyncio.to_thread(copy)

    def _device_tensors(self) -> Iterator[Tensor]:
        """Drop the gradients, and yield all tensors on the device that last between two train steps."""
        policy, optimizer = self._opened
        modules: list[Module] = [policy.model]
        optimizers = [optimizer]
        if self.reference is not None and not self.reference.is_shared:
            modules.append(self.reference.policy.model)
        if self.critic is not None:
            modules.append(self.critic.module)
            optimizers.append(self.critic.optimizer)
        for module in modules:
            module.zero_grad()
        states = (value for chosen in optimizers for state in chosen.state.values() for value in state.values())
        tensors = chain(*((*module.parameters(), *module.buffers()) for module in modules), states)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == policy.device.type:
                yield tensor

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of every weight."""
        return await self._run(self.policy.manifest)

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights, detached, on the device. They are the live weights unless ``model.dtype`` is bfloat16.
        Sharded weights are gathered, and adapters merged, block by block when a reader asks for the first weight of a
        block. A second reader would gather them again.
        """

        def lead() -> list[tuple[str, Tensor]]:
            with self._memory_advice("weight sync"):
                return self._lead_weights()

        return await self._run(lead)

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]`` under the current weights, at temperature 1."""
        return await self._lead("canary", lambda: self._lead_canary(list(tokens)))

    async def close(self) -> None:
        """End the other ranks, wait for the work of the threads, and release the models."""
        if self._loaded is not None:
            with suppress(RankError):  # ranks that already exited need no end command
                await self._run(self._end_ranks)
        for pool in (self._pool, self._writer_pool):
            await asyncio.to_thread(pool.shutdown)
        self._loaded = self.reference = self.critic = None

    async def _run(self, work: Callable[[], T]) -> T:
        return await run_to_end(self._pool, work)

    async def _lead(self, what: str, work: Callable[[], T]) -> T:
        """Run work that all ranks take part in."""

        def led() -> T:
            with self._ranks.together(what), self._memory_advice(what):
                return work()

        return await self._run(led)

    @property
    def policy(self) -> Policy:
        """The model that is trained. Use it only between two calls of the learner.

        Raises:
            LearnerError: The learner is not open.
        """
        return self._opened[0]

    @property
    def _opened(self) -> tuple[Policy, torch.optim.Optimizer]:
        if self._loaded is None:
            raise LearnerError("the learner holds no model: call open() first")
        return self._loaded

    @contextmanager
    def _command(self, name: str, body: bytes = b"", **arguments: Any) -> Iterator[None]:
        """Announce a command and run rank 0's part of it in the ``with`` block."""
        with self._ranks.command(name, body, **arguments), self._memory_advice(name):
            yield

    @contextmanager
    def _memory_advice(self, what: str) -> Iterator[None]:
        """Turn a lack of memory of the device in the ``with`` block into an error that names the settings that help.

        Raises:
            DeviceMemoryError: No train step of this process has succeeded, so the same step would fail again.
            RestartRequested: Earlier steps succeeded. The memory may be fragmented, or used by another process.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            device = select_device(self._config.model.device)
            tokens = self._config.trainer.first_max_tokens if self._loaded is None else self.policy.division.max_tokens
            measured, kind = self._measure(device), _kind(device)
            # engines that take turns with the trainer are asleep now
            shared = shares_gpu() and not self._config.synchronizer.colocated
            value = estimate(self._config, kind, measured, tokens)
            advice = remedies(self._config, kind, measured, tokens, shared=shared)
            text = describe_lack(what, error, card_of(device), value, advice, is_first=not self._has_trained)
            raise (RestartRequested(text) if self._has_trained else DeviceMemoryError(text)) from error

    def _measure(self, device: torch.device) -> dict[str, Measured]:
        """Return the measured memory of the trained models."""
        if self._measured is None:
            self._measured = measure_trained(self._config, _kind(device))
        return self._measured

    def _limit_passes(self, facts: Mapping[str, Any]) -> None:
        """Choose the size of a pass for the GPU, if it is not configured; the same on all ranks.

        Args:
            facts: Facts of the policy in the checkpoint. A limit in these facts is used again on the same kind of GPU,
                because the division into passes changes the rounding of a step.
        """
        card = card_of(self.policy.device)
        if self._config.trainer.max_tokens_per_micro_batch != "auto" or card is None:
            return
        limit = stored_limit(facts, card)
        if limit is None:
            measured = self._measure(self.policy.device)
            limit = choose_limit(self._config, card, measured, shared=shares_gpu())
        tokens = min(self._ranks.gather(limit.tokens))
        self._pass_limit = replace(limit, tokens=tokens)
        log.info("pass_size_chosen", tokens=tokens, reason=limit.reason)
        for policy in (self.policy, *([] if self.reference is None else [self.reference.policy])):
            policy.limit_passes(tokens)
        if self.critic is not None:
            self.critic.division = replace(self.critic.division, max_tokens=tokens)

    def _lead_open(self, checkpoint: Path | None) -> None:
        if self._ranks.world > 1 and (why := self._config.sharding_obstacle):
            raise LearnerError(f"the trainer was started with {self._ranks.world} processes, but {why}")
        self._ranks.connect_store()
        place = None if checkpoint is None else str(checkpoint.absolute())
        try:
            with self._command("open", checkpoint=place):
                self._open(checkpoint)
        except FailedElsewhereError as error:
            if error.error == DamagedCheckpointError.__name__:
                raise DamagedCheckpointError(str(error)) from error
            raise

    def _copy(self) -> tuple[Parts, int]:
        """Return a copy of rank 0's state, and the number of the command with which the other ranks copied theirs."""
        self._drop_copy()
        with self._command("copy"):
            self._copied = self._ranks.number
            return self._copies.take(self._parts()), self._copied

    def _drop_copy(self) -> None:
        """Tell the other ranks that the latest copy will not be written, unless it was written already."""
        if self._copied and self._ranks.world > 1:
            self._mail().send(f"folder/{self._copied}", "")
            self._copied = 0

    def _mail(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = self._ranks.mailbox()
        return self._mailbox

    def _lead_tensors(self) -> LateTensors:
        """Return the tensors of the policy's state, gathered from the ranks one at a time when they are read, on this
        thread.
        """

        def gather(name: str) -> Tensor:
            with self._command("tensor", tensor=name):
                return gathered(self.policy.state()[name]).cpu()

        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self.policy.state().items()
        }
        return LateTensors(shapes, gather)

    def _lead_weights(self) -> list[tuple[str, Tensor]]:
        policy = self.policy
        if self._ranks.world == 1 and policy.adapters is None:
            return policy.weights()

        def gather(names: list[str]) -> dict[str, Tensor]:
            with self._ranks.together("gathering"), self._command("gather", weights=names):
                return self._gather(names)

        late: list[tuple[str, _Gathered]] = []
        for bucket in plan(policy.manifest(), GATHER_BYTES):
            names = [name for name, _, _ in bucket.entries]
            # gather on the learner's thread, because all rank commands run there
            block = _Block(partial(self._pool.submit, gather, names))
            late += [(name, _Gathered(name, block)) for name in names]
        return cast("list[tuple[str, Tensor]]", late)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return whole weights by name; the other ranks gather the same weights."""
        return {name: gathered(self.policy.weight(name)) for name in names}

    def _end_ranks(self) -> None:
        self._drop_copy()
        self._ranks.announce("end")
        self._ranks.close()

    def _lead_canary(self, tokens: list[int]) -> list[float]:
        with self._command("canary", tokens=tokens):
            return self.policy.sequence_logprobs(tokens)

    def follow(self) -> None:
        """Run the commands that rank 0 announces until it announces the end; used by ranks above 0. Blocks.

        Rank 0 handles a command that failed on any rank, for example because of a damaged checkpoint: rank 0 announces
        the next command, or ends.

        Raises:
            RankError: Another rank is gone.
            DeviceMemoryError: A device has too little memory, and a restart does not help.
            RestartRequested: This rank's device had too little memory, and a restart may help.
        """
        # slow imports of the first command; its deadline begins when all ranks are there
        import transformers.modeling_utils
        import transformers.models.auto.modeling_auto  # noqa: F401

        self._ranks.connect_store()
        try:
            self._follow()
        finally:
            if self._mailbox is not None:
                self._mailbox.close()
            self._writer_pool.shutdown()
        self._ranks.close()

    def _follow(self) -> None:
        patience = math.inf
        while (command := self._ranks.next(patience)).name != "end":
            patience = math.inf
            try:
                with (
                    self._ranks.together(command.name),
                    self._ranks.voting(command.name),
                    self._memory_advice(command.name),
                ):
                    self._execute(command)
            except DeviceMemoryError:
                raise
            except FatalError as error:
                log.warning("rank_command_failed", command=command.name, reason=str(error))
                patience = AFTER_AN_ERROR

    def _execute(self, command: RankCommand) -> None:
        arguments = command.arguments
        if command.name == "open":
            self._open(None if arguments["checkpoint"] is None else Path(arguments["checkpoint"]))
        elif command.name == "step":
            self._step(ExperienceBatch.decode(command.body), arguments["number"])
        elif command.name == "copy":
            if self._writing is not None:
                self._writing.result()  # rank 0 copies again after the latest copy was written or dropped
            parts, number, mailbox = self._copies.take(self._parts()), self._ranks.number, self._mail()
            self._writing = self._writer_pool.submit(self._write_own, parts, number, mailbox)
        elif command.name == "tensor":
            gathered(self.policy.state()[arguments["tensor"]])
        elif command.name == "gather":
            for name in arguments["weights"]:
                gathered(self.policy.weight(name))
        elif command.name == "canary":
            self.policy.sequence_logprobs(arguments["tokens"])
        else:
            raise RankError(
                f"rank 0 announced {command.name!r}, which this rank does not know: run the same release on all ranks"
            )

    def _open(self, checkpoint: Path | None) -> None:
        self._ranks.open(select_device(self._config.model.device, self._ranks.world))
        load_plugins(self._config.algorithm)
        load_classes(self._config.algorithm)
        self._has_classes = has_classes(self._config.algorithm)
        old = checkpoint if checkpoint is not None and is_legacy(checkpoint) else None
        facts: dict[str, dict[str, Any]] = {}
        if checkpoint is not None:
            facts = read_old_facts(checkpoint) if old else read_facts(checkpoint)
        try:
            folder = old / MODEL_FOLDER if old else self._model_folder
            policy = Policy(self._config.model, folder, self._config.seed, self._config.trainer, self._ranks)
        except ModelNotLoadedError as error:
            if old is None:
                raise
            raise DamagedCheckpointError(str(error)) from error
        optimizer = make_optimizer(policy.model, self._config.algorithm.optimizer)
        reference = facts.get("reference", {})
        if needs_reference(self._config.algorithm):
            origin = reference.get("origin")
            if policy.adapters is not None:
                self.reference = Reference.of(policy, self._config.algorithm.reference, origin)
            else:
                self.reference = Reference.load(self._config, self._model_folder, origin, self._ranks)
            self.reference.has_moved = bool(reference.get("has_moved"))
        if self._config.algorithm.estimator.kind == "gae":
            self.critic = Critic(self._config, self._model_folder, self._ranks)
        self._loaded, self._memory = (policy, optimizer), Memory()
        if checkpoint is not None:
            self._restore(checkpoint)
        self._limit_passes(facts.get("policy", {}))
        self._guard = Guard(self._config.trainer.guard, self._memory.guard)

    def _take_weights(self, checkpoint: Path | None) -> None:
        if checkpoint is None or is_legacy(checkpoint):  # a checkpoint of an earlier release holds a model folder
            self._open(checkpoint)
            return
        if self._loaded is None:
            self._open(None)
        read_policy(checkpoint, self.policy.state())

    def _restore(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint.

        Raises:
            DamagedCheckpointError: The checkpoint does not load, or belongs to a different setup.
            LearnerError: The checkpoint holds all weights, from an earlier release, and only adapters are trained.
        """
        policy, optimizer = self._opened
        modules: dict[str, Module] = {"policy": policy.model}
        if self.reference is not None and self.reference.has_moved:
            modules["reference"] = self.reference.policy.model
        if self.critic is not None:
            modules[CRITIC] = self.critic.module
        if not is_legacy(checkpoint):
            states = {name: module_state(module) for name, module in modules.items()}
            weights = {"optimizer": dict(policy.model.named_parameters())}
            if self.critic is not None:
                weights[CRITIC_OPTIMIZER] = dict(self.critic.module.named_parameters())
            parts = read_parts(checkpoint, states | {"policy": policy.state()}, weights)
        elif policy.adapters is None:
            parts = read_old_parts(checkpoint, modules)
        else:
            raise LearnerError(
                f"the checkpoint {checkpoint} is of an earlier release, which trained all weights, and model.lora is "
                "set: leave model.lora out to resume, or start a new run with "
                f"model.model_path={checkpoint / MODEL_FOLDER}"
            )
        try:
            saved = optimizer_state(parts["optimizer"])
            restore_state(optimizer, saved, policy.model, self._config.algorithm.optimizer)
            self._memory = Memory(**parts["memory"].facts)
            if self.critic is not None:
                self.critic.restore(parts)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedCheckpointError(f"the state in {checkpoint} does not fit this run: {error!r}") from error

    def _parts(self) -> Parts:
        """Return everything that a checkpoint needs, as live tensors."""
        policy, optimizer = self._opened
        facts = {} if self._pass_limit is None else self._pass_limit.facts()
        parts = {"policy": StatePart(policy.state(), facts), "optimizer": optimizer_part(optimizer, policy.model)}
        parts["memory"] = StatePart(facts=asdict(self._memory))
        if self.reference is not None:
            parts["reference"] = self.reference.part()
        if self.critic is not None:
            parts |= self.critic.parts()
        return parts

    def _write(self, folder: Path, parts: Parts, number: int) -> str:
        """Write a checkpoint; callable from any thread if ``parts`` are copies.

        Args:
            folder: The checkpoint.
            parts: State of this process, or of rank 0.
            number: Number of the command with which the other ranks copied their states.
        """
        policy = self.policy
        weights: Mapping[str, Tensor] = parts["policy"].tensors
        if self._ranks.world == 1:
            write_parts(folder, parts)
        else:
            write_index(folder, parts, self._write_all(folder, parts, number))
            weights = stored_policy(folder)
        if self._config.trainer.export == "every":
            policy.save(folder / MODEL_FOLDER, self._model_folder, weights)
        return policy.digest(weights)

    def _write_all(self, folder: Path, parts: Parts, number: int) -> list[StoredRows]:
        """Let all ranks write their shards, and return the places of all tensors.

        Raises:
            OSError: A rank could not write.
            RankError: A rank is gone.
        """
        mailbox = self._mail()
        self._copied = 0
        mailbox.send(f"folder/{number}", str(folder.absolute()))
        failures: list[Exception] = []
        chunks: list[StoredRows] = []
        try:
            chunks += write_shard(folder, parts, 0)
        except Exception as error:  # the others write to the folder until they have answered
            failures.append(error)
        answers = [f"written/{number}/{rank}" for rank in range(1, self._ranks.world)]
        for rank, key in enumerate(answers, 1):
            rows, failure = mailbox.receive(key, self._ranks.seconds)
            chunks += (StoredRows(name, first, tuple(sizes), *place) for name, first, sizes, *place in rows)
            if failure:
                failures.append(OSError(f"rank {rank} of {self._ranks.world} could not write its shards: {failure}"))
        mailbox.remove(f"folder/{number}", *answers)
        if failures:
            raise failures[0]
        return chunks

    def _write_own(self, parts: Parts, number: int, mailbox: Mailbox) -> None:
        """Write the shards of a rank above 0 when rank 0 names the folder."""
        place = mailbox.receive(f"folder/{number}")
        if not place:
            return
        chunks, failure = list[StoredRows](), ""
        try:
            if not Path(place).is_dir():
                raise FileNotFoundError(f"{place} does not exist here: ranks on several machines need a shared folder")
            chunks = write_shard(Path(place), parts, self._ranks.rank)
        except Exception as error:  # rank 0 reports it
            failure = str(error) or repr(error)
        mailbox.send(f"written/{number}/{self._ranks.rank}", [[astuple(chunk) for chunk in chunks], failure])

    def _step(self, batch: ExperienceBatch, step_number: int) -> dict[str, float]:
        started = time.perf_counter()
        config = self._config.algorithm
        seed_step(self._config.seed, step_number)
        batch, unknown = mask_nonfinite_logprobs(batch, config)
        rate = learning_rate(config.optimizer, step_number, self._total_steps)
        set_learning_rate(self._opened[1], rate)
        weights = component_weights(config, step_number)
        advantages = AdvantageResult(batch, self._memory)
        watch = Stopwatch(self.policy.device)
        if config.advantage_agent == "trainer":
            models = self.critic, self.reference
            with watch.part("score"):
                advantages = trainer_advantages(batch, self._config, weights, step_number, self._memory, *models)
        metrics = advantages.metrics | self._train(advantages, weights, step_number, watch)
        if metrics["actor/optimizer_steps"]:
            self._memory = advantages.memory
            if self.reference is not None:
                self.reference.follow(self.policy, step_number)
        self._memory = replace(self._memory, guard=self._guard.state())
        self._has_trained = True
        release_cached_memory()
        return (
            metrics
            | watch.metrics()
            | length_metrics(batch)
            | self._speed(batch, metrics.get("data/trained_tokens", 0.0), time.perf_counter() - started)
            | {"actor/lr": rate, "mismatch/unknown_logprobs": float(unknown)}
        )

    def _speed(self, batch: ExperienceBatch, trained: float, seconds: float) -> dict[str, float]:
        """Return speed metrics of a train step that trained ``trained`` tokens in ``seconds``.

        A token takes about 6 floating point operations per weight: 2 forward and 4 backward (arXiv 2001.08361, section
        2.1). 2 of the 4 backward operations compute the weight's own gradient; a frozen weight does not need them.
        """
        epochs, peak = self._config.algorithm.epochs, self._config.trainer.peak_tflops
        rate = int(tokens_of(batch).sum()) * epochs / seconds
        weights = self.policy.parameters
        tflops = sum((6 if weight.requires_grad else 4) * weight_count(weight) for weight in weights) * rate / 1e12
        return {
            "time/train_step": seconds,
            "perf/tokens_per_second": rate,
            "perf/trained_tokens_per_second": trained * epochs / seconds,
            "perf/tflops": tflops,
        } | ({} if peak is None else {"perf/mfu": tflops / peak})

    def _train(
        self, advantages: AdvantageResult, weights: Mapping[str, float], step_number: int, watch: Stopwatch
    ) -> dict[str, float]:
        """Run the optimizer steps of a train step and return their metrics. Where ``advantages`` has critic targets,
        the critic's optimizer steps run too.
        """
        batch, targets = advantages.batch, advantages.targets
        tally, critic_tally = StepTotals(), CriticTotals()
        if not batch:
            tally.add_empty()
            return tally.metrics() | (critic_tally.metrics() if targets is not None else {})
        policy, optimizer = self._opened
        config, critic = self._config.algorithm, self.critic
        only_critic = critic is not None and critic.is_warming_up
        loss = StepLoss(config, weights, entropy_coefficient(config, step_number, self._total_steps))
        with span("pack tokens"):
            tokens = train_tokens(batch, config, weights, step_number, policy.routed)
        needed = set() if only_critic else needs(config, weights)
        with watch.part("score"):
            columns, before = self._score(tokens, needed, advantages.ref)
        compares = (bool(weights.get("rl")) and compares_tokens(config)) or self._has_classes
        reduction = self._config.reduction
        has_moved = False  # while False, the weights are the weights that ``old`` was scored with
        used = 0
        for epoch in range(config.epochs):
            purpose = f"{self._config.seed}/{step_number}/{epoch}"
            for number, part in enumerate(split(len(batch), config.mini_batches, purpose)):
                batches = tokens.micro_batches(part, policy.division, reduction)
                if not batches:
                    tally.add_empty()
                    continue
                if critic is not None and targets is not None:
                    critic_tally.add(*critic.optimizer_step(batches, targets))
                if only_critic:
                    continue
                extra, class_metrics = dict(columns), dict[str, float]()
                if compares:
                    with watch.part("score"):
                        scored = None if has_moved or self._has_classes else before
                        scored = scored or score(policy, batches, tokens.tokens, needed)
                        whole = tokens.whole_step(part, reduction)
                        joined = step_columns(whole, scored, columns, loss, f"{purpose}/{number}")
                        extra, class_metrics = extra | joined.columns, joined.metrics
                applied, metrics = optimizer_step(
                    policy,
                    optimizer,
                    batches,
                    loss,
                    extra,
                    config.optimizer.clip_grad,
                    guard=self._guard,
                    has_moved=has_moved,
                    offload=config.optimizer.offload,
                    watch=watch,
                )
                has_moved = has_moved or applied
                used += len(part) * applied
                tally.add(applied, metrics | class_metrics)
                if not applied:
                    norm, reason = metrics["actor/grad_norm"], skipped_for(metrics)
                    log.warning("optimizer_step_skipped", reason=reason, step=step_number, grad_norm=norm)
        with span("sum up the step"):
            metrics_of_step = tally.metrics() | token_metrics(tokens, weights) | {"data/reuse_mean": used / len(batch)}
            if policy.routed is not None:
                metrics_of_step["mismatch/replayed_frac"] = tokens.replayed
        if critic is None:
            return metrics_of_step
        critic.steps += critic_tally.has_learned
        return metrics_of_step | critic_tally.metrics()

    def _score(
        self, tokens: StepTokens, needed: Collection[str], ref: Tensor | None
    ) -> tuple[dict[str, Tensor], Scores | None]:
        """Return the columns ``old`` and ``ref`` of a train step, if needed, and all scores computed with ``old``. Each
        column takes one forward pass, before the weights change. A ``ref`` argument that is not None is used instead of
        a forward pass.
        """
        policy = self.policy
        columns: dict[str, Tensor] = {}
        before: Scores | None = None
        if "old" in needed:
            batches = tokens.micro_batches(tokens.experiences({SAMPLED}), policy.division)
            before = score(policy, batches, tokens.tokens, needed)
            columns["old"] = before.logprob
        if ref is not None:
            columns["ref"] = ref.to(policy.device)
        elif "ref" in needed:
            assert self.reference is not None
            roles = {SAMPLED, PAIRED, IMITATED} if self._has_classes else {SAMPLED, PAIRED}
            batches = tokens.micro_batches(tokens.experiences(roles), policy.division)
            columns["ref"] = self.reference.logprobs(batches, tokens.tokens)
        return columns, before


def _kind(device: torch.device) -> Device:
    return "cuda" if device.type == "cuda" else "cpu"


class _Block:
    """Weights that are gathered from their shards, or merged with their adapters, when the first of them is read. So no
    process holds the whole model. Thread-safe.
    """

    def __init__(self, gather: Callable[[], Future[dict[str, Tensor]]]) -> None:
        self._gather = gather
        self._unread: dict[str, Tensor] = {}
        self._reading = threading.Lock()

    def take(self, name: str) -> Tensor:
        """Return a weight, and forget it. Call it from any thread except the learner's."""
        with self._reading:
            if name not in self._unread:
                self._unread = self._gather().result()
            return self._unread.pop(name)


class _Gathered:
    """One weight of a block."""

    def __init__(self, name: str, block: _Block) -> None:
        self._name, self._block = name, block

    def full_tensor(self) -> Tensor:
        """Return the weight; see :meth:`_Block.take`."""
        return self._block.take(self._name)


def seed_step(seed: int, step: int) -> None:
    """Seed all random draws of a train step, such as the draws of a loss plug-in, from the run's seed and the step
    number alone. A resumed run then draws the same numbers, and no random state has to be saved.
    """
    digest = int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=4).digest(), "big")
    random.seed(digest)
    np.random.seed(digest)
    torch.manual_seed(digest)
