"""What the queue costs: seconds a step of the whole loop (broker, processes, HTTP) against the work in one process.

    python benchmarks/loop_overhead.py [CONFIG] [STEPS]

Baseline, in the same run: one process that samples with the same generator, rewards, computes advantages, takes the
same optimizer step and copies the weights, one after the other, on one thread. A ratio below 1 means that working at
the same time gains more than the messages cost.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config import Config, load_config
from trinity_mq.data import open_taskset
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.models import ensure_model_folder
from trinity_mq.models.engines.generation.request import GenerationRequest
from trinity_mq.models.engines.generation.text import TextCodec
from trinity_mq.models.engines.torch.generator import TextGenerator
from trinity_mq.rewards import create_reward
from trinity_mq.testing.runs import LocalRun
from trinity_mq.training.learner import TorchLearner

WARM_UP = 5


async def one_process(config: Config, folder: Path, steps: int) -> list[float]:
    """Return the seconds of each step of the baseline."""
    model = ensure_model_folder(config.model, folder / "model", config.seed)
    generator = TextGenerator.build(config.model, model, num_threads=1)
    codec = TextCodec.load(model)
    learner = TorchLearner(config, model, steps)
    await learner.open(None)
    taskset = open_taskset(config.buffer.taskset, repeat_times=config.algorithm.repeat_times, seed=config.seed)
    reward = create_reward(config.buffer.taskset.reward_fn, {})
    generator.apply(generator.check(dict(await learner.weights())))
    seconds = []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        tasks = taskset.next_batch(config.buffer.batch_size)
        prompts = [codec.encode(task.raw_task["question"]) for task in tasks]
        requests = [
            GenerationRequest(
                prompt,
                max_tokens=config.model.max_response_tokens,
                n=task.repeat_times,
                stop_ids=codec.stop_ids,
                seed=1000 * step + number,
            )
            for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
        ]
        experiences = [
            Experience(
                eid=EID(batch=step, task=number, run=run),
                tokens=[*prompt, *sample.token_ids],
                prompt_length=len(prompt),
                logprobs=sample.logprobs,
                reward=sum(
                    reward(sample.text, task.raw_task["answer"], finished=sample.finish_reason == "stop").values()
                ),
                temperature=1.0,
            )
            for number, (prompt, task, samples) in enumerate(
                zip(prompts, tasks, generator.generate(requests), strict=True)
            )
            for run, sample in enumerate(samples)
        ]
        kept, _ = estimate(ExperienceBatch.of(experiences), config.algorithm.estimator)
        if kept:
            await learner.step(kept, step)
            generator.apply(generator.check(dict(await learner.weights())))
        seconds.append(time.perf_counter() - started)
    await learner.close()
    return seconds


async def whole_loop(path: Path, folder: Path, steps: int) -> list[float]:
    """Return the seconds between train steps of ``trinity-mq run``."""
    overrides = (f"buffer.total_steps={steps}", "explorer.eval_interval=100000", "explorer.eval_on_startup=false")
    async with LocalRun(path, folder / "run", overrides) as run:
        code, output = await run.ended(600.0)
    if code != 0:
        raise SystemExit(output)
    times = [line["time"] for line in run.metrics() if "trainer/step" in line]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    """Measure both and print the ratio."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "examples" / "arithmetic.yaml")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(path, [f"run_dir={folder}/baseline"])
        loop = statistics.median(asyncio.run(whole_loop(path, Path(folder), steps))[WARM_UP:])
        baseline = statistics.median(asyncio.run(one_process(config, Path(folder), steps))[WARM_UP:])
    size = config.buffer.batch_size * config.algorithm.repeat_times
    print(f"{path.name}, {size} experiences a step, medians of {steps} steps")
    print(f"one process, one thread : {baseline * 1e3:7.1f} ms a step")
    print(f"trinity-mq run          : {loop * 1e3:7.1f} ms a step")
    print(f"ratio                   : {loop / baseline:7.2f}")


if __name__ == "__main__":
    main()
