"""Asks the held-out questions of a run twice of the folder that it has trained: by plain transformers, by the engine.

    python benchmarks/compare_answers.py runs/smollm2 [--before] [--dtype bfloat16] [--samples 5] [--out FILE]

Greedy answers, with the lengths, system prompt and reward function of the run's first eval taskset. ``--before`` asks
the model that the run began with, in plain transformers, as well. Exit code 1 if an answer of the trained folder
differs. In float32 none does; in bfloat16 the two round differently, so that of two tokens that are equally likely each
may take another one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trinity_mq.config import Config, load_config
from trinity_mq.config.threads import cpu_threads
from trinity_mq.data import open_taskset
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.torch.generator import auxiliary_generator
from trinity_mq.messages import TaskBody
from trinity_mq.models import ensure_model_folder
from trinity_mq.rewards import create_reward
from trinity_mq.rewards.registry import ACCURACY, parts_of

Answers = list[tuple[str, bool]]
"""Text and whether it ended by itself, for each question."""


def conversations(tasks: Sequence[TaskBody]) -> list[list[dict[str, str]]]:
    """Return the messages of each task."""
    found = []
    for task in tasks:
        system = task.format_args["system_prompt"]
        question = {"role": "user", "content": str(task.raw_task[task.format_args["prompt_key"]])}
        found.append([{"role": "system", "content": system}, question] if system else [question])
    return found


@torch.inference_mode()
def by_transformers(folder: Path, config: Config, chats: Sequence[list[dict[str, str]]]) -> Answers:
    """Return the answers as the documentation of transformers gets them: one question after another, no padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.model.dtype)).eval()
    answers = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=config.model.max_response_tokens, do_sample=False)
        tokens = output[0, prompt["input_ids"].shape[1] :]
        finished = int(tokens[-1]) == tokenizer.eos_token_id
        answers.append((tokenizer.decode(tokens, skip_special_tokens=True), finished))
    return answers


def by_engine(folder: Path, config: Config, chats: Sequence[list[dict[str, str]]]) -> Answers:
    """Return the answers of the engine's generator, all questions in one batch."""
    model = config.model.model_copy(update={"tiny": None, "model_path": str(folder)})
    threads = cpu_threads(config, config.explorer.rollout_model.num_threads)
    generator = auxiliary_generator("trained", model, folder, num_threads=threads)
    codec = generator.codec
    requests = [
        GenerationRequest(
            codec.encode(codec.render(chat)),
            config.model.max_response_tokens,
            temperature=0.0,
            stop_ids=codec.stop_ids,
        )
        for chat in chats
    ]
    found = [completion for (completion,) in generator.generate(requests)]
    return [(completion.text, completion.finish_reason == "stop") for completion in found]


def accuracy(tasks: Sequence[TaskBody], answers: Answers) -> float:
    """Return the share of right answers, by the tasks' reward function."""
    reward = create_reward(tasks[0].reward_fn, tasks[0].reward_fn_args)
    truths = [str(task.raw_task[task.format_args["response_key"]]) for task in tasks]
    right = [
        parts_of(reward, text, truth, finished=finished)[ACCURACY]
        for (text, finished), truth in zip(answers, truths, strict=True)
    ]
    return sum(right) / len(right)


def last_evaluation(run: Path, taskset: str) -> float | None:
    """Return the accuracy of the run's last evaluation, which its own engine has answered."""
    name = f"eval/{taskset}/accuracy/mean@1"
    found = [json.loads(line).get(name) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return next((value for value in reversed(found) if value is not None), None)


def main() -> int:
    """Compare, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--before", action="store_true", help="ask the first model as well")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="that both compute in; the run's own unless given"
    )
    parser.add_argument("--samples", type=int, default=5, help="questions whose answers are printed")
    parser.add_argument("--out", type=Path, help="write all answers there, as JSON")
    options = parser.parse_args()
    config = load_config(options.run / "config.yaml", [f"model.dtype={options.dtype}"] if options.dtype else [])
    torch.set_num_threads(cpu_threads(config, config.explorer.rollout_model.num_threads))
    taskset = config.buffer.eval_tasksets[0]
    tasks = open_taskset(taskset, is_eval=True).all_tasks()
    chats = conversations(tasks)
    final = options.run / "final"
    answers = {"transformers": by_transformers(final, config, chats), "engine": by_engine(final, config, chats)}
    if options.before:
        first = ensure_model_folder(config.model, options.run / "model", config.seed)
        answers = {"before": by_transformers(first, config, chats)} | answers
    for place, chat in enumerate(chats[: options.samples]):
        print(chat[-1]["content"])
        for name, texts in answers.items():
            text, finished = texts[place]
            print(f"    {name:12} {text!r}{'' if finished else ' ... cut'}")
    equal = sum(a == b for a, b in zip(answers["transformers"], answers["engine"], strict=True))
    summary: dict[str, Any] = {
        "questions": len(chats),
        "equal_answers": equal,
        "accuracy_of_the_runs_last_evaluation": last_evaluation(options.run, taskset.name),
        **{f"accuracy_{name}": accuracy(tasks, texts) for name, texts in answers.items()},
    }
    for name, value in summary.items():
        print(f"{name.replace('_', ' '):38} {value}")
    if options.out:
        questions = [chat[-1]["content"] for chat in chats]
        options.out.write_text(json.dumps({**summary, "questions_asked": questions, "answers": answers}, indent=1))
    return 0 if equal == len(chats) else 1


if __name__ == "__main__":
    sys.exit(main())
