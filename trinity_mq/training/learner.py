"""The learner runs train steps one after another, in its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor

from trinity_mq.algorithms.evaluator import component_weights
from trinity_mq.algorithms.plugins import load_plugins
from trinity_mq.algorithms.scoring import Scores
from trinity_mq.config.algorithm.needs import needs, needs_reference
from trinity_mq.config.run import Config
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.experience.ragged import Indexes
from trinity_mq.runtime.threads import run_to_end
from trinity_mq.training.advantages import Advantages, Memory, trainer_advantages
from trinity_mq.training.checkpoint import DamagedCheckpointError
from trinity_mq.training.critic import CRITIC_FILE, Critic, CriticTotals
from trinity_mq.training.packing import PAIRED, SAMPLED, TrainTokens, flatten, split, without_unknown
from trinity_mq.training.policy import LearnerError, ModelNotLoadedError, Policy
from trinity_mq.training.reference import REFERENCE_FILE, Reference
from trinity_mq.training.update import (
    StepLoss,
    StepTotals,
    compared,
    compares_tokens,
    entropy_coefficient,
    learning_rate,
    make_optimizer,
    optimizer_step,
    score,
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
        self._loaded: tuple[Policy, torch.optim.Optimizer] | None = None
        self._reference: Reference | None = None
        self._critic: Critic | None = None
        self._memory = Memory()
        # The number of threads is a property of the thread that calls torch, so the worker sets it for itself.
        self._pool = ThreadPoolExecutor(1, "learner", torch.set_num_threads, (config.trainer.num_threads,))

    async def open(self, checkpoint: Path | None) -> None:
        """Load the model, and from a checkpoint also optimizer and random state; a reference model where the loss needs
        one, which begins as the first model of the run.

        Raises:
            DamagedCheckpointError: The checkpoint does not load.
            LearnerError: Nothing loadable there, no such device, or the reference is not that of the checkpoint.
            FatalError: A plug-in of the loss cannot be used.
        """
        await self._run(lambda: self._open(checkpoint))

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Do one train step: ``epochs x mini_batches`` optimizer steps.

        An optimizer step whose loss or gradient is not finite is left out and counted in ``actor/nonfinite_skipped``,
        one without a trained token in ``actor/empty_skipped``; the weights stay as they were. Averages are over the
        others and absent if there are none. A step that does not change the policy leaves the baselines of roles, the
        coefficient of a KL in the rewards and the reference as they were. In the warm-up of a critic only that
        learns, and ``critic/optimizer_steps`` says how often.

        Args:
            experiences: With what the loss needs, see :func:`trinity_mq.training.packing.flatten`.
            step_number: From 1; learning rate, weights of entropy and components, mini-batches and the age of tokens
                follow from it.
        """
        return await self._run(lambda: self._step(experiences, step_number))

    async def save(self, folder: Path) -> None:
        """Write ``model/``, which ``transformers`` loads, and ``optimizer.pt`` with optimizer, random state and what
        goes on from step to step.
        """
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
        self._loaded = self._reference = self._critic = None

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
        load_plugins(self._config.algorithm)
        folder = self._model_folder if checkpoint is None else checkpoint / MODEL_FOLDER
        try:
            policy = Policy(self._config.model, folder, self._config.seed)
        except ModelNotLoadedError as error:
            if checkpoint is None:
                raise
            raise DamagedCheckpointError(str(error)) from error
        optimizer = make_optimizer(policy.parameters, self._config.algorithm.optimizer)
        origin, has_moved, memory = None, False, Memory()
        if checkpoint is not None:
            origin, has_moved, memory = _restore(checkpoint / OPTIMIZER_FILE, policy, optimizer)
        if needs_reference(self._config.algorithm):
            random_state = torch.get_rng_state()
            self._reference = Reference.load(self._config, self._model_folder, origin)
            torch.set_rng_state(random_state)
            if checkpoint is not None and has_moved:
                self._reference.restore(checkpoint / REFERENCE_FILE)
        if self._config.algorithm.estimator.kind == "gae":
            self._critic = Critic(self._config, self._model_folder)
            if checkpoint is not None:
                self._critic.restore(checkpoint / CRITIC_FILE)
        self._loaded, self._memory = (policy, optimizer), memory

    def _save(self, folder: Path) -> None:
        policy, optimizer = self._opened
        policy.save(folder / MODEL_FOLDER, self._model_folder)
        state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        state["memory"] = asdict(self._memory)
        if self._reference is not None:
            state |= {"reference": self._reference.origin, "reference_has_moved": self._reference.has_moved}
            if self._reference.has_moved:
                self._reference.save(folder / REFERENCE_FILE)
        if policy.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state_all()
        torch.save(state, folder / OPTIMIZER_FILE)
        if self._critic is not None:
            self._critic.save(folder / CRITIC_FILE)

    def _step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        started = time.perf_counter()
        batch = ExperienceBatch.of(experiences)
        if not batch:
            raise ValueError(
                f"train step {step_number} has no experiences: an empty batch is a skipped step, not a train step"
            )
        config = self._config.algorithm
        batch, unknown = without_unknown(batch, config)
        rate = learning_rate(config.optimizer, step_number, self._total_steps)
        set_learning_rate(self._opened[1], rate)
        weights = component_weights(config, step_number)
        given = Advantages(batch, self._memory)
        if config.advantages_in == "trainer":
            models = self._critic, self._reference
            given = trainer_advantages(batch, self._config, weights, step_number, self._memory, *models)
        metrics = given.metrics | self._train(given, weights, step_number)
        if metrics["actor/optimizer_steps"]:
            self._memory = given.memory
            if self._reference is not None:
                self._reference.follow(self._opened[0], step_number)
        seconds = time.perf_counter() - started
        sizes, prompt = tokens_of(batch), int(batch.prompt_lengths().sum())
        answers = len(batch) + int((batch.lengths("rejected") >= 0).sum())
        return metrics | {
            "actor/lr": rate,
            "mismatch/unknown_logprobs": float(unknown),
            "prompt_length/mean": prompt / len(batch),
            "response_length/mean": (int(sizes.sum()) - prompt) / answers,
            "time/train_step": seconds,
            "perf/tokens_per_second": int(sizes.sum()) * config.epochs / seconds,
        }

    def _train(self, given: Advantages, weights: Mapping[str, float], step_number: int) -> dict[str, float]:
        """Do the optimizer steps of a train step, of the critic too where there are targets of what it learns; return
        their metrics.
        """
        batch, targets = given.batch, given.targets
        tally, critic_tally = StepTotals(), CriticTotals()
        if not batch:
            tally.add_empty()
            return tally.metrics() | (critic_tally.metrics() if targets is not None else {})
        policy, optimizer = self._opened
        config, critic = self._config.algorithm, self._critic
        only_critic = critic is not None and critic.is_warming_up
        loss = StepLoss(config, weights, entropy_coefficient(config, step_number, self._total_steps))
        tokens = flatten(batch, config, weights, step_number)
        needed = set() if only_critic else needs(config, weights)
        columns, before = self._score(tokens, needed, given.ref)
        compares = bool(weights.get("rl")) and compares_tokens(config)
        budget = self._config.trainer.max_tokens_per_micro_batch
        is_first = True  # the weights are still those that ``old`` was scored with
        for epoch in range(config.epochs):
            purpose = f"{self._config.seed}/{step_number}/{epoch}"
            for number, part in enumerate(split(len(batch), config.mini_batches, purpose)):
                batches = tokens.micro_batches(part, budget, self._config.reduction)
                if not batches:
                    tally.add_empty()
                    continue
                if critic is not None and targets is not None:
                    critic_tally.add(*critic.optimizer_step(batches, targets))
                if only_critic:
                    continue
                whole = dict(columns)
                if compares:
                    scored = before if is_first and before is not None else None
                    scored = scored or score(policy, batches, tokens.tokens, needed)
                    whole |= compared(batches, scored, columns, config, f"{purpose}/{number}")
                finite, metrics = optimizer_step(policy, optimizer, batches, loss, whole, config.optimizer.clip_grad)
                is_first = is_first and not finite
                tally.add(finite, metrics)
                if not finite:
                    log.warning("optimizer_step_skipped", reason="loss or gradient not finite", step=step_number)
        if critic is None:
            return tally.metrics()
        critic.steps += critic_tally.has_learned
        return tally.metrics() | critic_tally.metrics()

    def _score(
        self, tokens: TrainTokens, needed: Collection[str], ref: Tensor | None
    ) -> tuple[dict[str, Tensor], Scores | None]:
        """Return the columns ``old`` and ``ref`` of a train step, as far as they are needed, and all that came with
        ``old``; one forward pass each, before the weights move. ``ref`` is given where it is known.
        """
        budget = self._config.trainer.max_tokens_per_micro_batch
        columns: dict[str, Tensor] = {}
        before: Scores | None = None
        if "old" in needed:
            batches = tokens.micro_batches(tokens.experiences({SAMPLED}), budget)
            before = score(self._opened[0], batches, tokens.tokens, needed)
            columns["old"] = before.logprob
        if ref is not None:
            columns["ref"] = ref.to(self._opened[0].device)
        elif "ref" in needed:
            assert self._reference is not None
            batches = tokens.micro_batches(tokens.experiences({SAMPLED, PAIRED}), budget)
            columns["ref"] = self._reference.logprobs(batches, tokens.tokens)
        return columns, before


def tokens_of(batch: ExperienceBatch) -> Indexes:
    """Return the tokens of each experience, both answers of a pair counted."""
    lengths = [np.maximum(batch.lengths(name), 0) for name in ("tokens", "chosen", "rejected")]
    total: Indexes = lengths[0] + lengths[1] + lengths[2]
    return total


def _restore(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[str | None, bool, Memory]:
    """Put back the optimizer and the random state in ``path``; return which reference model it was trained with and
    whether that had moved, and what the last train step left for the next.
    """
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
        memory = Memory(**state.get("memory", {}))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} does not fit the model beside it: {error}") from error
    return state.get("reference"), state.get("reference_has_moved", False), memory
