"""The work of a training loop in one process: no queue, no HTTP, one thread of torch.

It samples, rewards, estimates and trains with the same code as a whole run. Baseline of ``loop_overhead.py``, and
the fast way to compare algorithms in ``learning_curves.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config import Config
from trinity_mq.data import open_taskset
from trinity_mq.engines.generation.request import Completion, GenerationRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.messages import TaskBody
from trinity_mq.models import ensure_model_folder
from trinity_mq.rewards import create_reward
from trinity_mq.sync.channels.buckets import gathered
from trinity_mq.training.learner import TorchLearner


class OneProcess:
    """A run's generator, reward and learner, one step after another."""

    def __init__(self, config: Config, folder: Path, steps: int, lag: int = 0) -> None:
        """Build the model.

        Args:
            config: The run; its tasksets are single questions with a reward function of text.
            folder: For the first model.
            steps: Train steps of the run, for the decay of the learning rate.
            lag: Train steps by which the weights that sample are behind.
        """
        model = ensure_model_folder(config.model, folder / "model", config.seed)
        self.config = config
        self.generator = TextGenerator.build(config.model, model, num_threads=1)
        self.codec = TextCodec.load(model)
        self.learner = TorchLearner(config, model, steps)
        self.taskset = open_taskset(config.buffer.taskset, repeat_times=config.algorithm.repeat_times, seed=config.seed)
        self.reward = create_reward(config.buffer.taskset.reward_fn, {})
        self._waiting: deque[Mapping[str, torch.Tensor]] = deque(maxlen=lag + 1)
        self._sampled_by: deque[int] = deque(maxlen=lag + 1)

    async def open(self) -> None:
        """Load the learner's model, and give its weights to the generator."""
        await self.learner.open(None)
        await self._sync(0)

    async def close(self) -> None:
        """End the learner's thread."""
        await self.learner.close()

    async def step(self, number: int) -> dict[str, float]:
        """Do train step ``number``, from 1, and return its metrics; none where no group taught anything."""
        config = self.config
        tasks = self.taskset.next_batch(config.buffer.batch_size)
        experiences = self._experiences(tasks, number)
        kept = ExperienceBatch.of(experiences)
        if config.algorithm.advantage_agent == "operator":
            kept, _ = estimate(kept, config.algorithm.estimator)
        metrics = await self.learner.step(kept, number) if kept else {}
        await self._sync(number)
        return metrics | {"reward": sum(one.reward or 0.0 for one in experiences) / len(experiences)}

    def accuracy(self) -> float:
        """Return the share of the held-out questions whose likeliest answer, under the newest weights, is right."""
        self._apply(self._waiting[-1])
        section = self.config.buffer.eval_tasksets[0]
        tasks = open_taskset(section, repeat_times=1, seed=0).all_tasks()
        answers = self._generate([_request(self, task, n=1, temperature=0.0, seed=0) for task in tasks])
        self._apply(self._waiting[0])
        right = [self._parts(task, answer)["accuracy"] for task, (answer,) in zip(tasks, answers, strict=True)]
        return sum(right) / len(right)

    def _experiences(self, tasks: Sequence[TaskBody], number: int) -> list[Experience]:
        groups = []
        for place, task in enumerate(tasks):
            sampled = _request(self, task, n=task.repeat_times, temperature=1.0, seed=1000 * number + place)
            groups.append(sampled)
        answers = self._generate(groups)
        found = []
        for place, (task, request, samples) in enumerate(zip(tasks, groups, answers, strict=True)):
            for run, sample in enumerate(samples):
                found.append(self._experience(EID(batch=number, task=place, run=run), task, request, sample))
        if getattr(self.config.algorithm.estimator, "baseline", "") == "greedy":
            found += self._greedy(tasks, number)
        return found

    def _greedy(self, tasks: Sequence[TaskBody], number: int) -> list[Experience]:
        """Return an experience of the likeliest answer to each task, which is a baseline alone."""
        requests = [_request(self, task, n=1, temperature=0.0, seed=0) for task in tasks]
        found = []
        for place, (task, request, (answer,)) in enumerate(zip(tasks, requests, self._generate(requests), strict=True)):
            one = self._experience(EID(batch=number, task=place, run=task.repeat_times), task, request, answer)
            one.info["greedy"] = True
            found.append(one)
        return found

    def _experience(self, eid: EID, task: TaskBody, request: GenerationRequest, sample: Completion) -> Experience:
        return Experience(
            eid=eid,
            tokens=[*request.prompt, *sample.token_ids],
            prompt_length=len(request.prompt),
            logprobs=sample.logprobs,
            reward=sum(self._parts(task, sample).values()),
            temperature=1.0,
            versions=[(0, 1, self._sampled_by[0])],
            info=self._info(task),
        )

    def _info(self, task: TaskBody) -> dict[str, Any]:
        """Return what the estimator reads of an experience besides its reward."""
        estimator = self.config.algorithm.estimator
        if estimator.kind == "gigpo":
            return {"env_state_hash": task.raw_task["question"]}
        return {"role": "solver"} if getattr(estimator, "baseline", "") == "role_mean" else {}

    def _parts(self, task: TaskBody, sample: Completion) -> Mapping[str, float]:
        return self.reward(sample.text, task.raw_task["answer"], finished=sample.finish_reason == "stop")

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return self.generator.generate(requests)

    async def _sync(self, number: int) -> None:
        late = await self.learner.weights()
        weights = await asyncio.to_thread(lambda: {name: gathered(tensor).clone() for name, tensor in late})
        self._waiting.append(weights)
        self._sampled_by.append(number)
        self._apply(self._waiting[0])

    def _apply(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.generator.apply(self.generator.check(dict(weights)))


def _request(loop: OneProcess, task: TaskBody, **settings: Any) -> GenerationRequest:
    return GenerationRequest(
        loop.codec.encode(task.raw_task["question"]),
        max_tokens=loop.config.model.max_response_tokens,
        stop_ids=loop.codec.stop_ids,
        **settings,
    )
