"""The learner runs train steps one after another, in its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from trinity_mq.algorithms.losses import clipped_policy_loss
from trinity_mq.config.algorithm.pieces import Clip, LossConfig
from trinity_mq.config.run import Config
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.training.checkpoint import DamagedCheckpointError
from trinity_mq.training.packing import pack, split
from trinity_mq.training.policy import LearnerError, ModelNotLoadedError, Policy
from trinity_mq.training.update import (
    StepTotals,
    entropy_coefficient,
    learning_rate,
    make_optimizer,
    optimizer_step,
    set_learning_rate,
)

MODEL_FOLDER = "model"
"""Inside a checkpoint: what ``transformers`` loads."""
OPTIMIZER_FILE = "optimizer.pt"

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Learner(Protocol):
    """Interface of the weight updates to the trainer. A cancelled call finishes its work before it returns."""

    async def open(self, checkpoint: Path | None) -> None:
        """Load the first model, or all that :meth:`save` wrote to the folder ``checkpoint``.

        Raises:
            DamagedCheckpointError: The checkpoint does not load; another one may.
        """

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Do train step ``step_number`` (from 1) and return its metrics, all of them finite.

        ``actor/optimizer_steps`` says how often the weights changed; 0 means that they did not.
        """

    async def save(self, folder: Path) -> None:
        """Write everything :meth:`open` needs into the existing folder."""

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of every weight, tied ones once, always in the same order."""

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights as in the manifest; they may be the live ones, so use them before the next step."""

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]`` under the current weights, at temperature 1."""

    async def close(self) -> None:
        """Wait for what is running and give everything back."""


class TorchLearner:
    """Trains a Hugging Face causal language model; all of torch runs in one worker thread."""

    def __init__(self, config: Config, model_folder: Path, total_steps: int | None) -> None:
        """Nothing is loaded yet.

        Args:
            config: The run; used are its seed, algorithm, model and trainer.
            model_folder: Hugging Face folder of the first model; the tokenizer is always taken from here.
            total_steps: Train steps of the run, for the decay; None leaves it out.
        """
        self._config = config
        self._model_folder = model_folder
        self._total_steps = total_steps
        algorithm = config.algorithm
        if (
            algorithm.estimator.where == "trainer"
            or any(
                getattr(algorithm, name) != getattr(LossConfig(), name)
                for name in LossConfig.model_fields
                if name != "surrogate"
            )
            or not isinstance(algorithm.surrogate, Clip)
        ):
            raise LearnerError(f"algorithm {algorithm.algorithm_type} has pieces that the trainer does not take yet")
        self._loaded: tuple[Policy, torch.optim.Optimizer] | None = None
        # The number of threads is a property of the thread that calls torch, so the worker sets it for itself.
        self._pool = ThreadPoolExecutor(1, "learner", torch.set_num_threads, (config.trainer.num_threads,))

    async def open(self, checkpoint: Path | None) -> None:
        """Load the model, and from a checkpoint also optimizer and random state.

        Raises:
            DamagedCheckpointError: The checkpoint does not load.
            LearnerError: Nothing loadable there, or no such device.
        """
        await self._run(lambda: self._open(checkpoint))

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Do one train step: ``epochs x mini_batches`` optimizer steps.

        An optimizer step whose loss or gradient is not finite is left out and counted in ``actor/nonfinite_skipped``,
        one without a trained token in ``actor/empty_skipped``; the weights stay as they were. Averages are over the
        others and absent if there are none.

        Args:
            experiences: With advantages, see :func:`trinity_mq.training.packing.pack`.
            step_number: From 1; learning rate, entropy weight and mini-batches follow from it.
        """
        return await self._run(lambda: self._step(experiences, step_number))

    async def save(self, folder: Path) -> None:
        """Write ``model/``, which ``transformers`` loads, and ``optimizer.pt`` with optimizer and random state."""
        await self._run(lambda: self._save(folder))

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return ``(name, dtype, shape)`` of every weight."""
        return await self._ask(Policy.manifest)

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights, detached, on the device; the live ones unless ``model.dtype`` is bfloat16."""
        return await self._ask(Policy.weights)

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]``."""
        return await self._ask(lambda policy: policy.sequence_logprobs(tokens))

    async def close(self) -> None:
        """Wait for the thread's work and end it."""
        await asyncio.to_thread(self._pool.shutdown)
        self._loaded = None

    async def _run(self, work: Callable[[], T]) -> T:
        return await run_to_end(self._pool, work)

    async def _ask(self, work: Callable[[Policy], T]) -> T:
        return await self._run(lambda: work(self._opened[0]))

    @property
    def _opened(self) -> tuple[Policy, torch.optim.Optimizer]:
        if self._loaded is None:
            raise LearnerError("the learner holds no model: call open() first")
        return self._loaded

    def _open(self, checkpoint: Path | None) -> None:
        folder = self._model_folder if checkpoint is None else checkpoint / MODEL_FOLDER
        try:
            policy = Policy(self._config.model, folder, self._config.seed)
        except ModelNotLoadedError as error:
            if checkpoint is None:
                raise
            raise DamagedCheckpointError(str(error)) from error
        optimizer = make_optimizer(policy.parameters, self._config.algorithm.optimizer)
        if checkpoint is not None:
            _restore(checkpoint / OPTIMIZER_FILE, policy, optimizer)
        self._loaded = policy, optimizer

    def _save(self, folder: Path) -> None:
        policy, optimizer = self._opened
        policy.save(folder / MODEL_FOLDER, self._model_folder)
        state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        if policy.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state_all()
        torch.save(state, folder / OPTIMIZER_FILE)

    def _step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        started = time.perf_counter()
        batch = ExperienceBatch.of(experiences)
        if not batch:
            raise ValueError(
                f"train step {step_number} has no experiences: an empty batch is a skipped step, not a train step"
            )
        policy, optimizer = self._opened
        config = self._config.algorithm
        rate = learning_rate(config.optimizer, step_number, self._total_steps)
        set_learning_rate(optimizer, rate)
        entropy_weight = entropy_coefficient(config, step_number, self._total_steps)
        tally = StepTotals()
        for epoch in range(config.epochs):
            for part in split(batch, config.mini_batches, f"{self._config.seed}/{step_number}/{epoch}"):
                batches = pack(part, self._config.trainer.max_tokens_per_micro_batch)
                if not batches:
                    tally.add_empty()
                    continue
                loss = clipped_policy_loss
                finite, metrics = optimizer_step(policy, optimizer, batches, loss, config, entropy_weight)
                tally.add(finite, metrics)
                if not finite:
                    log.warning("optimizer_step_skipped", reason="loss or gradient not finite", step=step_number)
        sequence, prompt = int(batch.lengths("tokens").sum()), int(batch.prompt_lengths().sum())
        seconds = time.perf_counter() - started
        return tally.metrics() | {
            "actor/lr": rate,
            "prompt_length/mean": prompt / len(batch),
            "response_length/mean": (sequence - prompt) / len(batch),
            "time/train_step": seconds,
            "perf/tokens_per_second": sequence * config.epochs / seconds,
        }


def _restore(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Put back the optimizer and the random state in ``path``."""
    try:
        state = torch.load(path, map_location=policy.device, weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        # What torch says is left to the chain: it advises to load without weights_only.
        raise DamagedCheckpointError(f"{path} is damaged or not there") from error
    try:
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        if policy.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda_rng"]])
    except (KeyError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} does not fit the model beside it: {error}") from error
