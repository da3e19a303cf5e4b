"""The example's task by trinity-mq and by TRL's GRPOTrainer: held-out accuracy and tokens a second, side by side.

    pip install -e '.[trl]' -c constraints-cpu.txt
    python benchmarks/bench_trl.py [--seeds 3] [--steps 300] [--out FOLDER]

The same first model, questions, rewards, group size, loss (GRPO with clip .2 and .28, token mean, standard deviation
of the group), entropy bonus, AdamW and schedule. TRL samples and trains in one process; trinity-mq with a real
RabbitMQ, engine, runners, operator and trainer, at ``sync_offset: 0`` (on-policy, as TRL) and at 1 (the example's).
They run one after the other, seed by seed, so that what else the machine does meets all of them.

Tokens a second are prompt and answer tokens of a step over the median seconds from one train step to the next;
evaluations are left out. Results go to ``trl.json`` in the folder, which is read again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from learning_curves import Curve, Study, configuration, metrics, table, whole_run
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import Config, load_config
from trinity_mq.data.synthetic import problems
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.engines.torch.generator import decode
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.models import ensure_model_folder
from trinity_mq.rewards import create_reward
from trinity_mq.training.optimizers import decay_factor, learning_rate, make_optimizer

ALGORITHM = {"algorithm_type": "grpo", "surrogate": {"low": 0.2, "high": 0.28, "dual": None}}
SYSTEMS = {"trl": None, "trinity-mq-on-policy": 0, "trinity-mq": 1}
"""``sync_offset`` of each that has one."""
LIMIT = 900.0
"""Seconds after which TRL's process is ended."""


def train_with_trl(file: Path, folder: Path) -> dict[str, Any]:
    """Train a configuration with TRL; return its curve, the median seconds of a step, the end of each step (since the
    epoch) and the process's processor seconds by then.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load_config(file, [f"run_dir={folder}/run"])
    steps, algorithm = config.buffer.total_steps, config.algorithm
    assert steps is not None
    model_folder = ensure_model_folder(config.model, folder / "model", config.seed)
    codec = TextCodec.load(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    reward = create_reward(config.buffer.taskset.reward_fn, {})
    ended = codec.stop_ids

    def rewards(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [
            sum(reward(text, truth, finished=ids[-1] in ended).values())
            for text, ids, truth in zip(completions, completion_ids, answer, strict=True)
        ]

    optimizer = make_optimizer(model, algorithm.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate(algorithm.optimizer, done + 1, steps) / algorithm.optimizer.lr
    )
    size = config.buffer.batch_size * algorithm.repeat_times
    seconds: list[float] = []
    ends: list[float] = []
    cpu: list[float] = []
    accuracy: dict[str, float] = {}

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Times the steps, lets the entropy bonus fall as the example does, and evaluates."""

        def __init__(self) -> None:
            self.began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            factor = decay_factor(algorithm.optimizer, state.global_step + 1, steps)
            trainer.entropy_coef = algorithm.entropy_coef * factor

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            ends.append(time.time())
            cpu.append(time.process_time())
            if state.global_step % config.explorer.eval_interval == 0 or state.global_step == steps:
                accuracy[str(state.global_step)] = held_out_accuracy(model, codec, config)
            self.began = time.perf_counter()

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewards],
        train_dataset=Dataset.from_list(
            [{"prompt": one["question"], "answer": one["answer"]} for one in problems("ops3", "train")]
        ),
        optimizers=(optimizer, schedule),
        callbacks=[Watch()],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            per_device_train_batch_size=size,
            num_generations=algorithm.repeat_times,
            max_completion_length=config.model.max_response_tokens,
            temperature=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
            entropy_coef=algorithm.entropy_coef,
            max_grad_norm=algorithm.optimizer.clip_grad,
            seed=config.seed,
            use_cpu=True,
            bf16=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return {"accuracy": accuracy, "step_seconds": statistics.median(seconds[10:]), "ends": ends, "cpu": cpu}


@torch.inference_mode()
def held_out_accuracy(model: Any, codec: TextCodec, config: Config) -> float:
    """Return the share of held-out questions whose likeliest answer is right."""
    questions = problems("ops3", "test")
    reward = create_reward(config.buffer.taskset.reward_fn, {})
    requests = [
        GenerationRequest(
            codec.encode(one["question"]), max_tokens=config.model.max_response_tokens, temperature=0.0,
            stop_ids=codec.stop_ids,
        )
        for one in questions
    ]  # fmt: skip
    model.eval()
    rows = decode(model, requests, pad_id=codec.pad_id, device=torch.device("cpu"))
    model.train()
    right = 0.0
    for one, row in zip(questions, rows, strict=True):
        text = codec.decode([[token for token in row.token_ids if token not in codec.stop_ids]])[0]
        right += reward(text, one["answer"], finished=row.finish_reason == "stop")["accuracy"]
    return right / len(questions)


def run_trl(data: dict[str, Any], seed: int, folder: Path) -> tuple[Curve, float]:
    """Train with TRL in a process of its own; return its curve and the seconds of a step."""
    import yaml

    where = folder / f"trl-{seed}"
    where.mkdir()
    file = where / "config.yaml"
    file.write_text(yaml.safe_dump(data | {"seed": seed}), encoding="utf-8")
    began = time.monotonic()
    command = [sys.executable, __file__, "--trl", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        return Curve("trl", seed, 0, time.monotonic() - began, failure=done.stderr[-500:]), 0.0
    found = json.loads(done.stdout.splitlines()[-1])
    return Curve("trl", seed, 0, time.monotonic() - began, found["accuracy"]), found["step_seconds"]


def run_ours(name: str, data: dict[str, Any], seed: int, folder: Path) -> tuple[Curve, float]:
    """Train with whole runs of trinity-mq; return the curve and the seconds from train step to train step."""
    curve = whole_run(name, data, seed, 0, folder)
    rows = list(metrics(folder / f"{name}-0-{seed}" / "metrics.jsonl"))
    times = [row["time"] for row in rows if "trainer/step" in row]
    between = [after - before for before, after in itertools.pairwise(times)]
    return curve, statistics.median(between[10:]) if len(between) > 10 else 0.0


def speeds(found: Sequence[dict[str, Any]], tokens: float) -> str:
    """Return a Markdown table of steps and tokens a second."""
    rows = [
        "| system | seconds a step, by seed | steps a second | tokens a second | of TRL's |",
        "|---|---|---|---|---|",
    ]
    medians = {name: statistics.median(one["step_seconds"] for one in found if one["name"] == name) for name in SYSTEMS}
    for name, median in medians.items():
        each = ", ".join(f"{one['step_seconds']:.3f}" for one in found if one["name"] == name)
        rate = 1 / median if median else 0.0
        rows.append(f"| {name} | {each} | {rate:.2f} | {tokens * rate:.0f} | {medians['trl'] * rate:.2f} |")
    return "\n".join(rows)


async def compare(study: Study, file: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not there yet; return the seconds of a step of each run."""
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    with tempfile.TemporaryDirectory(prefix="tmq-trl-") as temporary:
        folder = Path(temporary)
        node = PrivateNode(folder / "broker")
        await node.start()
        os.environ[URL_VARIABLE] = node.url
        try:
            for seed, (name, offset) in itertools.product(range(options.seeds), SYSTEMS.items()):
                if study.has(name, 0, seed):
                    continue
                data = configuration(ALGORITHM, options)
                if offset is None:
                    curve, seconds = await asyncio.to_thread(run_trl, data, seed, folder)
                else:
                    data["synchronizer"]["sync_offset"] = offset
                    curve, seconds = await asyncio.to_thread(run_ours, name, data, seed, folder)
                found.append({"name": name, "seed": seed, "step_seconds": seconds})
                file.write_text(json.dumps(found, indent=1) + "\n")
                study.add(curve)
        finally:
            await node.stop()
    return found


def main() -> None:
    """Compare, and print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, help="peak learning rate (default: the example's)")
    parser.add_argument("--out", default="benchmarks/curves", help="folder of the results")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(train_with_trl(options.trl, Path(folder))))
        return
    study = Study(Path(options.out) / "trl.json")
    found = asyncio.run(compare(study, Path(options.out) / "trl-seconds.json", options))
    print(table(study.curves))
    print()
    # A question is 5 tokens long; its answer 2, a digit and the end, once that is learned.
    print(speeds(found, 32 * 16 * 7))


if __name__ == "__main__":
    main()
