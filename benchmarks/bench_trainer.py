"""The trainer's step beside a bare Hugging Face loop and beside TRL's: peak memory, and tokens a second.

    pip install -e '.[trl]' -c constraints-cpu.txt      (without it, TRL is left out)
    python benchmarks/bench_trainer.py [memory] [speed] [--check] [--threads N] [--quick] [--json FILE]

``memory``: the peak of one forward and backward pass over 8192 tokens with a vocabulary of 32768, beyond what the
process held before, against the logits of all tokens at once; each in a process of its own. At most a quarter.

``speed``: a whole train step of the learner (packing, scores, entropy, GRPO's loss, metrics, AdamW) against the bare
loop on the same padded and on the same packed data: logits, logprobs, the clipped loss, AdamW. At least 0.9 of the
bare loop on packed data. And against TRL's GRPOTrainer on the same sequences: at least 1.5 times its tokens a second,
the better of the learner's two rows by the better of TRL's two.

Lengths are ragged as those of answers are: log-normal, where the shortest (16 tokens) and the longest possible sequence
are two standard deviations from the median, and what is beyond is drawn again. The repetitions of all take turns, and
the fastest of each counts; on a CPU by the processor's time, so that it matters less what else the machine does. In the
first repetition all must find the same gradient norm: they compute the same loss on the same model.

TRL has no rollouts here: it is given the padded completions, advantages and sampler's logprobs that its own rollout
would have left, and timed are its ``training_step`` for each micro-batch, clipping and AdamW. Its loss is ``dapo``, the
mean over the tokens of the batch, with the same clip range and no KL. A micro-batch has the fewest sequences that
divide the batch and fill the learner's budget at the longest length, so never less memory than the learner's. TRL pads
every micro-batch to the longest sequence of the whole batch; a second row cuts each to its own longest, which a user
could do in a subclass. Gradient checkpointing, its default, is off. It has no packing for GRPO, and the kernels of
Liger and of the Hub are for GPUs, so neither is used.

Both parts are also for a GPU. ``--check`` ends with an error where a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from trinity_mq.config import AlgorithmConfig, Config
from trinity_mq.experience import EID, Experience
from trinity_mq.training.learner import TorchLearner
from trinity_mq.training.model.attention import model_inputs, use_packed_attention
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.packing import DivisionSettings, MicroBatch, StepTokens, train_tokens
from trinity_mq.training.update import StepLoss, accumulate

LOW, HIGH = 0.2, 0.28
MEMORY = {"vocabulary": 32768, "hidden": 64, "layers": 1, "sequences": 16, "response": 512}
MEMORY_BOUND = 0.25
SPEED = {"vocabulary": 2048, "hidden": 128, "layers": 4, "sequences": 64, "longest": 192, "budget": 1024}
SPEED_BOUND = 0.9
TRL_BOUND = 1.5
SHORTEST, PROMPT = 16, 8
WARM_UP = 2
"""Repetitions that do not count."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOCK = time.perf_counter if DEVICE == "cuda" else time.process_time


def make_model(folder: Path, vocabulary: int, hidden: int, layers: int) -> Path:
    """Write a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def ragged_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Return log-normal lengths from ``SHORTEST`` to ``longest``, prompts included; see the module."""
    r = random.Random(seed)
    middle, spread = (math.log(longest) + math.log(SHORTEST)) / 2, (math.log(longest) - math.log(SHORTEST)) / 4
    found: list[int] = []
    while len(found) < count:
        length = round(r.lognormvariate(middle, spread))
        found += [length] * (SHORTEST <= length <= longest)
    return found


def sampled(lengths: Sequence[int], prompt: int, vocabulary: int, seed: int) -> list[Experience]:
    """Return answers of random tokens, with logprobs near those of an untrained model."""
    r = random.Random(seed)
    return [
        Experience(
            eid=EID(1, 0, run),
            tokens=[r.randrange(vocabulary) for _ in range(length)],
            prompt_length=prompt,
            logprobs=[-8.0 + r.uniform(-0.3, 0.3) for _ in range(length - prompt)],
            advantages=[r.uniform(-1, 1)] * (length - prompt),
            temperature=1.0,
        )
        for run, length in enumerate(lengths)
    ]


def settings(folder: Path, threads: int, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"model_path": str(folder), "device": DEVICE},
            "algorithm": {"surrogate": {"low": LOW, "high": HIGH, "dual": None}, "repeat_times": 2},
            "trainer": {"num_threads": threads, **trainer},
        }
    )


def bare_loss(model: Any, batch: MicroBatch) -> Tensor:
    """Return the clipped loss as a loop without a framework computes it: from the logits of all positions."""
    logits = model(**model_inputs(model, batch), use_cache=False).logits.float()
    chosen = logits[batch.rows, batch.columns]
    logprob = chosen.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    ratio = (logprob - batch.mu).exp()
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    return -(torch.minimum(ratio * batch.advantages, clipped * batch.advantages) * batch.scale).sum()


def all_tokens(experiences: list[Experience]) -> StepTokens:
    return train_tokens(experiences, AlgorithmConfig(), {"rl": 1.0}, 1)


def peak_of(system: str, threads: int) -> float:
    """Return the peak in MiB of one pass in this process, beyond what it held before."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary), *(MEMORY[name] for name in ("vocabulary", "hidden", "layers")))
        config = settings(folder, threads)
        policy = Policy(config.model, folder, 0)
    loss = StepLoss(config.algorithm, {"rl": 1.0})

    def train(sequences: int, response: int) -> None:
        tokens = all_tokens(sampled([response + 1] * sequences, 1, MEMORY["vocabulary"], 0))
        batches = tokens.micro_batches(range(sequences), DivisionSettings(2**20))
        if system == "naive":
            for batch in batches:
                torch.autograd.backward(bare_loss(policy.model, batch.to(policy.device)))
        else:
            accumulate(policy, batches, loss, {})

    train(2, 8)  # imports, gradients and the pools of the allocator
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(MEMORY["sequences"], MEMORY["response"])
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    held = psutil.Process().memory_info().rss
    train(MEMORY["sequences"], MEMORY["response"])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held) / 2**20


def memory(threads: int) -> tuple[bool, dict[str, float]]:
    """Print the peaks; return whether the bound holds, and the ratio."""
    peaks = {}
    for system in ("naive", "ours"):
        command = [sys.executable, __file__, "--threads", str(threads), "--peak-of", system]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        peaks[system] = float(json.loads(done.stdout.splitlines()[-1]))
    tokens, ratio = MEMORY["sequences"] * MEMORY["response"], peaks["ours"] / peaks["naive"]
    print(f"peak memory of {tokens} tokens with a vocabulary of {MEMORY['vocabulary']} on {DEVICE}")
    print(f"  all logits at once {peaks['naive']:7.0f} MiB")
    print(f"  trinity-mq         {peaks['ours']:7.0f} MiB, {ratio:.2f} of that (bound {MEMORY_BOUND})")
    return ratio <= MEMORY_BOUND, {"peak memory, of all logits at once": ratio}


def bare_loop(folder: Path, batches: list[MicroBatch], *, packed: bool) -> Callable[[], float]:
    """Return one train step of a loop without a framework, which returns the norm of the gradient."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    if packed and (problem := use_packed_attention(model, "packed", torch.float32)):
        raise RuntimeError(problem)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        for batch in batches:
            torch.autograd.backward(bare_loss(model, batch.to(model.device)))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm.item()

    return step


def train_step(runner: asyncio.Runner, learner: TorchLearner, experiences: list[Experience]) -> float:
    return runner.run(learner.step(experiences, 1))["actor/grad_norm"]


def as_trl_prepares(experiences: list[Experience]) -> dict[str, Tensor]:
    """Return what TRL's rollout leaves for its train step: completions padded on the right to the longest."""
    answers = [torch.as_tensor(one.tokens[PROMPT:], device=DEVICE) for one in experiences]
    logprobs = [torch.as_tensor(one.logprobs, device=DEVICE) for one in experiences]
    prompts = torch.stack([torch.as_tensor(one.tokens[:PROMPT], device=DEVICE) for one in experiences]).long()
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": pad(answers).long(),
        "completion_mask": pad([torch.ones_like(one) for one in answers]).long(),
        "advantages": torch.tensor([torch.as_tensor(one.advantages)[0] for one in experiences], device=DEVICE),
        "num_items_in_batch": torch.tensor(sum(map(len, answers)), device=DEVICE),
        "old_per_token_logps": pad(logprobs),
    }


def trl_loop(folder: Path, prepared: dict[str, Tensor], *, cut: bool) -> Callable[[], float]:
    """Return one train step of TRL's GRPOTrainer on a prepared batch, which returns the norm of the gradient.

    Args:
        folder: Of the model; what TRL wants to write goes there.
        prepared: See :func:`as_trl_prepares`.
        cut: Whether each micro-batch is cut to its own longest completion, which TRL does not do by itself.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        """Trains on the prepared batch in place of rollouts."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            return dict(prepared)

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            batch = super()._prepare_inputs(generation_batch)
            if cut:
                longest = int(batch["completion_mask"].sum(1).max())
                names = ("completion_ids", "completion_mask", "old_per_token_logps")
                batch = batch | {name: batch[name][:, :longest] for name in names}
            return batch

    count, width = len(prepared["advantages"]), PROMPT + prepared["completion_ids"].shape[1]
    sizes = [one for one in range(1, count + 1) if not count % one]
    size = next((one for one in sizes if one * width >= SPEED["budget"]), count)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    trainer = Prepared(
        model=model,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": ""}] * count),
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), None),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=count // size,
            num_generations=2,
            loss_type="dapo",
            beta=0.0,
            epsilon=LOW,
            epsilon_high=HIGH,
            temperature=1.0,
            gradient_checkpointing=False,
            use_cpu=DEVICE == "cpu",
            bf16=False,
            report_to="none",
        ),
    )
    trainer.current_gradient_accumulation_steps = count // size

    def step() -> float:
        for _ in range(count // size):
            trainer.training_step(trainer.model, {}, None)
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return float(norm)

    return step


def speed(threads: int, repetitions: int) -> tuple[bool, dict[str, float]]:
    """Print tokens a second, by the fastest of the repetitions; return whether the bounds hold, and the ratios."""
    torch.set_num_threads(threads)
    lengths = ragged_lengths(SPEED["sequences"], SPEED["longest"], 0)
    experiences = sampled(lengths, PROMPT, SPEED["vocabulary"], 0)
    tokens = all_tokens(experiences)
    with tempfile.TemporaryDirectory() as temporary, asyncio.Runner() as runner:
        folder = make_model(Path(temporary), *(SPEED[name] for name in ("vocabulary", "hidden", "layers")))
        systems: dict[str, Callable[[], float]] = {}
        learners = []
        for packing in ("padded", "packed"):
            division = DivisionSettings(SPEED["budget"], packed=packing == "packed")
            batches = tokens.micro_batches(range(len(lengths)), division)
            systems[f"bare loop, {packing}"] = bare_loop(folder, batches, packed=packing == "packed")
            config = settings(folder, threads, packing=packing, max_tokens_per_micro_batch=SPEED["budget"])
            learner = TorchLearner(config, folder, None)
            runner.run(learner.open(None))
            learners.append(learner)
            systems[f"trinity-mq, {packing}"] = partial(train_step, runner, learner, experiences)
        if find_spec("trl"):
            prepared = as_trl_prepares(experiences)
            systems["TRL"] = trl_loop(folder, prepared, cut=False)
            systems["TRL, cut"] = trl_loop(folder, prepared, cut=True)
        best = fastest(systems, WARM_UP + repetitions)
        for learner in learners:
            runner.run(learner.close())
    bare = best["bare loop, packed"]
    mean = sum(lengths) / len(lengths)
    print(f"train step of {len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, mean {mean:.0f}")
    print(f"  on {DEVICE}, {threads} threads")
    for name, value in best.items():
        print(f"  {name:20} {sum(lengths) / value:8.0f} tokens a second, {bare / value:.2f} of the bare packed loop")
    ratio = bare / best["trinity-mq, packed"]
    print(f"  trinity-mq, packed, by the bare packed loop {ratio:.2f} (bound {SPEED_BOUND})")
    ratios = {"tokens/s of the bare packed loop's": ratio}
    if "TRL" not in best:
        print("  TRL is left out: it is not installed (extra trl)")
        return ratio >= SPEED_BOUND, ratios
    ours, theirs = (min(value for name, value in best.items() if name.startswith(who)) for who in ("trinity-mq", "TRL"))
    print(f"  trinity-mq by TRL, the better row of each   {theirs / ours:.2f} (bound {TRL_BOUND})")
    ratios["tokens/s of TRL's"] = theirs / ours
    return ratio >= SPEED_BOUND and theirs / ours >= TRL_BOUND, ratios


def fastest(systems: dict[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Let the systems take turns, and return the seconds of the fastest repetition of each after the warm-up.

    Raises:
        RuntimeError: They do not begin with the same gradient, so they do not compute the same.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    norms: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repetitions):
        for name, step in systems.items():
            started = CLOCK()
            norms[name].append(step())
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(CLOCK() - started)
    first = {name: found[0] for name, found in norms.items()}
    if max(first.values()) > 1.001 * min(first.values()):
        raise RuntimeError(f"gradient norms of the first step are {first}, wanted the same: the losses differ")
    return {name: min(found[WARM_UP:]) for name, found in seconds.items()}


def main() -> None:
    """Run the parts that are named, or all."""
    import figures

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", choices=["memory", "speed", []], help="what to measure (default: everything)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="one repetition of each train step")
    parser.add_argument("--check", action="store_true", help="end with an error where a bound does not hold")
    parser.add_argument("--peak-of", choices=["naive", "ours"], help=argparse.SUPPRESS)
    figures.add_option(parser)
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of, options.threads)))
        return
    parts = {
        "memory": partial(memory, options.threads),
        "speed": partial(speed, options.threads, 1 if options.quick else 6),
    }
    found = {name: parts[name]() for name in options.parts or parts}
    figures.write(options, {name: ratio for _, ratios in found.values() for name, ratio in ratios.items()})
    missed = [name for name, (met, _) in found.items() if not met]
    if options.check and missed:
        raise SystemExit(f"bounds that do not hold: {', '.join(missed)}")


if __name__ == "__main__":
    main()
