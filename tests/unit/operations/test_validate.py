from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.golden.families.makers import tokenizer_of
from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config
from trinity_mq.operations.long_prompts import count_long_prompts
from trinity_mq.operations.validate import (
    GREEDY_WORKFLOWS,
    WARNING,
    check_greedy_runs,
    check_optimizer,
    imports_torch,
    tasksets,
)
from trinity_mq.testing.scripted import byte_codec


def write(folder: Path, text: str) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    return str(path)


def test_a_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    text = f"name: x\nmodel: {{tiny: {{}}}}\nbuffer: {{taskset: {{name: mine, path: {tmp_path}/t.jsonl}}}}"
    assert main(["validate", write(tmp_path, text), "seed=3"]) == 0
    assert "taskset 'mine': 1 tasks" in capsys.readouterr().out


SFT = "{storage_type: file, schema_type: sft, path: x}"


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ([], True),
        (["source.tap=other"], True),
        (["buffer.total_steps=3"], False),
        (["algorithm.optimizer.lr_scheduler_type=constant"], False),
        (["mode=explore"], False),
        (["mode=train", "algorithm.algorithm_type=sft", f"buffer.trainer_input.experience_buffer={SFT}"], False),
    ],
)
def test_a_learning_rate_that_cannot_fall_is_said(settings: list[str], warns: bool) -> None:
    config = load_config({"name": "x", "model": {"tiny": {}}}, settings)
    text = "lr_scheduler_type is linear .* stays constant.* set buffer.total_steps, .* to constant"
    lines = check_optimizer(config)
    assert [bool(re.search(text, line)) and WARNING in line for line in lines] == [True] * warns


OWN = """
import sys
from pydantic import field_validator
from trinity_mq.operators import ExperienceOperator, ExperienceOperatorV1
from trinity_mq.workflows import Arguments, AsyncStepWiseRewardWorkflow, Workflow

def mine(log_ratio, logprob, advantage, *, slope=1.0):
    return log_ratio

def weigh(view, *, cut=1.0):
    return view.mu

def advantages(rewards, *, power=1.0):
    return rewards

def add(a: int) -> int:
    "Adds."
    return a

class Raises(ExperienceOperator):
    def __init__(self, path: str = "") -> None:
        self.lines = {}[path]

    def process(self, exps):
        return exps, {}

class Leaves(Raises):
    def __init__(self) -> None:
        sys.exit("no licence")

class Reward:
    def __init__(self) -> None:
        raise RuntimeError("no judge")

    def __call__(self, response, truth, *, finished):
        return {}

class Selector:
    def __init__(self, rows, seed) -> None:
        raise OSError("no index")

class Mine(Workflow):
    class Arguments_(Arguments):
        level: int = 1

        @field_validator("level")
        @classmethod
        def _known(cls, value: int) -> int:
            return {1: 1}[value]

    arguments_kind = Arguments_

class Steps(AsyncStepWiseRewardWorkflow):
    pass

class Plain(ExperienceOperatorV1):
    def process(self, exps):
        return exps, {}

class Awaited(ExperienceOperator):
    async def process(self, exps):
        return exps, {}

class Good(ExperienceOperator):
    def process(self, exps):
        return exps, {}
"""
OWN_LINES = {line: number for number, line in enumerate(OWN.splitlines(), 1)}


def line_of(code: str) -> str:
    """Return file and line of ``code`` in the user's own module, as a message ends with them."""
    [number] = [number for line, number in OWN_LINES.items() if line.strip() == code]
    return f"(validated_own.py:{number})"


@pytest.fixture
def own(tmp_path: Path, fresh_imports: None) -> Path:
    """A folder with a user's own module."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "validated_own.py").write_text(OWN)
    return tmp_path


def with_own(folder: Path, taskset: str = "", **sections: str) -> str:
    where = {"model": "{tiny: {}}", "plugin_dirs": f"['{folder / 'plugins'}']"}
    tasks = {"buffer": f"{{taskset: {{name: t, {taskset or 'storage_type: queue'}}}}}"}
    return write(folder, "".join(f"{key}: {value}\n" for key, value in {**where, **tasks, **sections}.items()))


def queue(more: str) -> dict[str, str]:
    return {"taskset": f"storage_type: queue, {more}"}


def operator(name: str, more: str = "") -> dict[str, str]:
    return {"operator": f"{{operators: [{{name: {name}{more}}}]}}"}


BOXED = "workflow: boxed_answer_workflow, workflow_args"
GREEDY = queue("workflow: math_workflow, workflow_args: {greedy_baseline: true}")
GPUS = "synchronizer.backend is nccl, which sends weights between GPUs, and "
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "workflow of outsiders": ({"outsiders": "{workflows: {math_workflw: []}}"}, "outsiders: unknown workflow 'math_wo"),
    "reward of outsiders": ({"outsiders": "{rewards: {char_mach: []}}"}, "'char_mach'; did you mean 'char_match'"),
    "unknown section": ({"bufer": "{}"}, "did you mean 'buffer'?"),
    "no file": ({"taskset": "path: /no/such/file.jsonl"}, "/no/such/file.jsonl cannot be read"),
    "no such problem": ({"taskset": "storage_type: synthetic, path: ops4"}, "did you mean 'ops3'?"),
    "no such reward": (queue("reward_fn: char_mach"), "did you mean 'char_match'"),
    "argument of a reward": (queue("reward_fn: gsm8k, reward_fn_args: {x: 1}"), "reward_fn_args {'x': 1}"),
    "no such operator": (operator("reward_filtr"), "did you mean 'reward_filter'"),
    "argument of an operator": (
        operator("reward_filter", ", args: {treshold: 1, api_key: s3cr3t}"),
        "operator.operators: operator 'reward_filter' cannot be made with args {'treshold': 1, 'api_key': '***'}",
    ),
    "remax without greedy runs": (
        {**queue("workflow: math_workflow"), "algorithm": "{algorithm_type: remax}"},
        "set buffer.taskset.workflow_args.greedy_baseline: true",
    ),
    "greedy runs for nothing": (
        {**GREEDY, "algorithm": "{algorithm_type: grpo}"},
        "the estimator of grpo has no use for a greedy run",
    ),
    "no model": ({"model": "{model_path: /no/such/model}"}, "model.model_path /no/such/model: no such folder"),
    "no template": (
        {"model": "{tiny: {chat_template: ''}}", "taskset": "storage_type: synthetic, path: ops3"},
        "model.tiny has no chat template, so it answers no chat requests, and workflow 'async_simple_workflow'",
    ),
    "no device": ({"model": "{tiny: {}, device: cuda}"}, "model.device is cuda, and torch sees no CUDA device here"),
    "no GPU": ({"synchronizer": "{backend: nccl}"}, f"{GPUS}torch sees no GPU here; use"),
    "nccl on a CPU": (
        {"model": "{tiny: {}, device: cpu}", "synchronizer": "{sync_method: nccl}"},
        f"{GPUS}model.device is cpu; use",
    ),
    "no vLLM": ({"explorer": "{rollout_model: {engine: vllm}}"}, "vLLM is not installed here; install"),
    "no 8-bit optimizer": (
        {"algorithm": "{optimizer: {optimizer_type: adamw_8bit}}"},
        "optimizer_type is adamw_8bit, and neither bitsandbytes nor torchao is installed: install one of them",
    ),
    "no muon": ({"algorithm": "{optimizer: {optimizer_type: muon}}"}, "is muon, which came with torch 2.9"),
    "offload": (
        {"algorithm": "{optimizer: {offload: true, optimizer_type: adamw_8bit}}"},
        "offload is true with optimizer_type adamw_8bit",
    ),
    "misspelled": (queue(BOXED + ": {with_thing: true}"), "did you mean 'with_think'"),
    "wrong type": (queue(BOXED + ": {with_think: 7}"), "workflow_args.with_think is 7"),
    "not this workflow's": (
        queue("workflow_args: {with_think: true}"),
        "workflow_args.with_think does not exist; there are greedy_baseline",
    ),
    "own workflow without its module": (queue("workflow: Mine"), "(in plugin_dirs there is 'validated_own.Mine')"),
    "unknown workflow": (queue("workflow: math_workflw"), "did you mean 'math_workflow'"),
    "unknown workflow of records": (
        queue("format: {workflow_key: wf}, allowed_workflows: [math_workflow, math_workflw]"),
        "did you mean 'math_workflow'",
    ),
    "argument of a workflow of records": (
        queue(f"{BOXED}: {{with_think: true}}, format: {{workflow_key: wf}}, allowed_workflows: [math_workflow]"),
        "workflow_args.with_think does not exist; there are greedy_baseline",
    ),
    "unknown reward of records": (
        queue("format: {reward_fn_key: rf}, allowed_reward_fns: [char_mach]"),
        "did you mean 'char_match'",
    ),
    "workflow of a record": (
        {
            "taskset": "storage_type: synthetic, path: max3, format: {workflow_key: question}, "
            "allowed_workflows: [simple_workflow]"
        },
        "taskset 't': record 0 of max3: '",
    ),
    "history": (queue("workflow: validated_own.Steps"), "set explorer.rollout_model.enable_history: true"),
    "plain operator": (operator("validated_own.Plain"), "Plain.process is a plain function"),
    "async operator": (operator("validated_own.Awaited"), "Awaited.process is an async function"),
    "operator that raises": (
        operator("validated_own.Raises", ", args: {path: a.txt}"),
        "operator 'validated_own.Raises' with args {'path': 'a.txt'} cannot be used: KeyError: 'a.txt' "
        + line_of("self.lines = {}[path]"),
    ),
    "operator that exits": (operator("validated_own.Leaves"), "no licence " + line_of('sys.exit("no licence")')),
    "reward that raises": (
        queue("reward_fn: validated_own.Reward"),
        "taskset 't': reward function 'validated_own.Reward' cannot be used: RuntimeError: no judge "
        + line_of('raise RuntimeError("no judge")'),
    ),
    "selector that raises": (
        {"taskset": "storage_type: synthetic, path: max3, data_selector: {selector_type: validated_own.Selector}"},
        "taskset 't': selector 'validated_own.Selector' cannot be made of records, a seed and {} "
        "(data_selector.kwargs): OSError: no index " + line_of('raise OSError("no index")'),
    ),
    "arguments that raise": (
        queue("workflow: validated_own.Mine, workflow_args: {level: 2}"),
        "taskset 't': workflow 'validated_own.Mine' cannot be used: KeyError: 2 " + line_of("return {1: 1}[value]"),
    ),
    "no such tool": (
        queue("workflow: tool_agent_workflow, workflow_args: {tools: [validated_own.ad]}"),
        "module 'validated_own' has no 'ad'; did you mean 'add'?",
    ),
}
"""Sections of a configuration, and what is said of them."""
LOSSES = {
    "surrogate: {kind: validated_own.min}": "has no 'min'; did you mean 'mine'?",
    "surrogate: {kind: validated_on.mine}": "module 'validated_on' cannot be imported",
    "surrogate: {kind: validated_own.mine, args: {slop: 2}}": "unexpected keyword argument 'slop'",
    "surrogate: {kind: validated_own.add}": "cannot be called with log_ratio, logprob, advantage and args {}",
    "correction: [{kind: validated_own.weight}]": "has no 'weight'; did you mean 'weigh'?",
    "correction: [{kind: validated_own.weigh, args: {cuts: 2}}]": "unexpected keyword argument 'cuts'",
    "estimator: {kind: validated_own.advantage}": "has no 'advantage'; did you mean 'advantages'?",
    "estimator: {kind: validated_own.advantages, args: {powr: 2}}": "unexpected keyword argument 'powr'",
}
REFUSED |= {loss: ({"algorithm": f"{{{loss}}}"}, said) for loss, said in LOSSES.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_ones(own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delattr("torch.optim.Muon", raising=False)
    for package in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("trinity_mq.engines.vllm.api.DISTRIBUTIONS", ("no-such-distribution",))
    sections, words = REFUSED[name]
    assert main(["validate", with_own(own, **sections)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("trinity-mq validate: algorithm: ") or name not in LOSSES
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("count", "more", "code", "words"),
    [
        ("8", [], 0, "GPUs: trainer-0 on 0,1,2,3; explorer-0-engine on 4; explorer-0-engine-1 on 5"),
        ("5", [], 2, "4 ranks and 4 engines of 1 GPU need 8 GPUs apart, 5 are here: set explorer.rollout_model"),
        ("5", ["synchronizer.backend=nccl"], 2, "need 8 GPUs apart, 5 are here"),
        ("0", [], 0, "is valid"),
        ("0", ["model.device=cuda"], 2, "none is visible (TRINITY_MQ_PRETEND_GPUS is '0')"),
        ("8", ["devices={engines: [[0]]}"], 2, "devices.engines has 1 lists of GPUs"),
        ("5", ["model.device=cpu"], 0, "is valid"),
    ],
)
def test_processes_that_do_not_fit_on_the_gpus_are_refused(
    own: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: str,
    more: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("TRINITY_MQ_PRETEND_GPUS", count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = with_own(own, trainer="{nproc: 4}", explorer="{rollout_model: {engine_num: 4}}")
    assert main(["validate", config, *more]) == code
    assert words in "".join(capsys.readouterr())


def test_a_file_that_holds_no_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", write(tmp_path, "[]")]) == 2
    assert "holds a list" in capsys.readouterr().err


def test_what_is_of_ones_own_and_can_be_used_is_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = "{surrogate: {kind: validated_own.mine, args: {slope: 2}}, correction: [{kind: validated_own.weigh}]}"
    taskset, history = "storage_type: queue, workflow: validated_own.Mine", "{rollout_model: {enable_history: true}}"
    good = {**operator("validated_own.Good"), "algorithm": loss}
    assert main(["validate", with_own(own, taskset, **good)]) == 0
    out = capsys.readouterr().out
    assert f"workflow Mine from {own}/plugins/validated_own.py" in out
    assert "algorithm: your own validated_own.mine\nalgorithm: your own validated_own.weigh\n" in out
    assert main(["validate", with_own(own, taskset.replace("Mine", "Steps"), explorer=history)]) == 0


@pytest.mark.parametrize(
    ("workflow", "arguments", "words"),
    [
        ("program_workflow", "{command: [/nowhere/python, agent.py]}", ["no program '/nowhere/python'"]),
        ("program_workflow", "{command: [python3, agent.py], cwd: /nowhere}", ["no folder '/nowhere'"]),
        ("program_workflow", "{command: [python3, agent.py]}", []),
        ("verifiers_workflow", "{python: /nowhere/python, task: 'a:b'}", ["no program '/nowhere/python'"]),
        (
            "trinity_mq.workflows.sessions.sandboxed_agent.SandboxedAgentWorkflow",
            "{command: [/nowhere/bin/codex, exec], visible: [/nowhere, /usr]}",
            ["visible: there is no '/nowhere'", "no program '/nowhere/bin/codex'"],
        ),
    ],
)
def test_programs_that_this_machine_does_not_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workflow: str, arguments: str, words: list[str]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    taskset = f"name: mine, path: {tmp_path}/t.jsonl, workflow: {workflow}, workflow_args: {arguments}"
    text = f"name: x\nmodel: {{tiny: {{}}}}\nbuffer: {{total_steps: 1, taskset: {{{taskset}}}}}"
    assert main(["validate", write(tmp_path, text)]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == len(words)
    assert all(part in line and "; " in line for part, line in zip(words, warnings, strict=True))


def test_a_module_that_ends_the_process_is_named(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "plugins" / "validated_own.py").write_text("import sys\nsys.exit('wrong machine')\n")
    assert main(["validate", with_own(own, **operator("validated_own.Raises"))]) == 2
    assert "cannot be imported: SystemExit: wrong machine (validated_own.py:2)" in capsys.readouterr().err


def test_every_problem_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {model_path: /no/such/model}\nbuffer: {taskset: {path: /no/such.jsonl, workflow_args: {x: 1}}}"
    assert main(["validate", write(tmp_path, text)]) == 2
    tasks, arguments, model = capsys.readouterr().err.splitlines()
    assert "/no/such.jsonl" in tasks
    assert "workflow_args.x" in arguments
    assert "/no/such/model" in model


def test_a_model_folder_needs_a_chat_template_for_workflows_that_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text = f"model: {{model_path: '{folder}'}}\nbuffer: {{taskset: {{storage_type: synthetic, path: ops3}}}}"
    assert main(["validate", write(tmp_path, text)]) == 2
    assert "has no chat template, so it answers no chat requests, and workflow" in capsys.readouterr().err
    assert main(["validate", write(tmp_path, text), "buffer.taskset.storage_type=queue"]) == 0
    assert "has no chat template" in capsys.readouterr().out
    assert main(["validate", write(tmp_path, text), "model.custom_chat_template='x'"]) == 0
    (tmp_path / "mine.jinja").write_text("x")
    path = f"model.chat_template_path={tmp_path / 'mine.jinja'}"
    assert main(["validate", write(tmp_path, text), path]) == 0
    assert main(["validate", write(tmp_path, text), path, "model.custom_chat_template='x'"]) == 2
    assert "custom_chat_template and chat_template_path are both given" in capsys.readouterr().err
    assert main(["validate", write(tmp_path, text), f"{path}.old"]) == 2
    assert "mine.jinja.old cannot be read" in capsys.readouterr().err
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["validate", write(tmp_path, text)]) == 0
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert main(["validate", write(tmp_path, text)]) == 0
    (folder / "config.json").unlink()
    assert main(["validate", write(tmp_path, text)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err


def test_switches_are_compared_with_the_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}{% if enable_thinking %}<think>{% endif %}")
    model = f"model: {{model_path: '{folder}', chat_template_kwargs: {{enable_thinking: false}}}}"
    text = f"{model}\nbuffer: {{taskset: {{name: mine, storage_type: synthetic, path: ops3}}}}"
    file = write(tmp_path, text)
    assert main(["validate", file]) == 0
    assert main(["validate", file, "buffer.taskset.rollout_args={reasoning_effort: medium}"]) == 0
    capsys.readouterr()
    for override, problem in (
        (
            "model.chat_template_kwargs={budget: 1}",
            "model.chat_template_kwargs: chat_template_kwargs.budget has no effect",
        ),
        (
            "buffer.taskset.rollout_args={reasoning_effort: low}",
            "rollout_args of taskset 'mine': reasoning_effort is low",
        ),
        ("buffer.taskset.rollout_args={reasoning_effort: huge}", "wanted one of none, minimal"),
        (
            "buffer.taskset.format.enable_thinking=true model.custom_chat_template=x model.chat_template_kwargs={}",
            "rollout_args of taskset 'mine': thinking cannot be switched on",
        ),
        (
            "mode=train algorithm.algorithm_type=sft buffer.total_steps=1 buffer.trainer_input.experience_buffer={"
            "storage_type: synthetic, path: ops3, schema_type: sft, format: {chat_template: x, enable_thinking: true}}",
            "format of the training data 'train': thinking cannot be switched on",
        ),
    ):
        overrides = re.split(r" (?=[a-z_.]+=)", override)
        assert main(["validate", file, *overrides]) == 2
        assert problem in capsys.readouterr().err


def test_switches_are_compared_with_the_family_that_the_user_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}[THINK]")
    model = f"model: {{model_path: '{folder}', chat_template_kwargs: {{enable_thinking: true}}}}"
    file = write(tmp_path, f"{model}\nbuffer: {{taskset: {{storage_type: synthetic, path: ops3}}}}")
    assert main(["validate", file]) == 2
    assert "the chat template has no thoughts" in capsys.readouterr().err
    assert main(["validate", file, "model.family=mistral"]) == 0
    assert main(["validate", file, "model.family=mistrl"]) == 2
    assert f"family of model {folder}: unknown model family 'mistrl'; did you mean" in capsys.readouterr().err


def test_records_with_prompts_that_are_too_long_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["1" * 60, "1" * 64, "1" * 65, "1" * 300]
    lines = (json.dumps({"question": prompt, "answer": "1"}) + "\n" for prompt in prompts)
    (tmp_path / "t.jsonl").write_text("".join(lines))
    limits = "max_model_len: 512, max_prompt_tokens: 64"
    taskset = f"buffer: {{taskset: {{name: mine, path: {tmp_path}/t.jsonl}}}}"
    assert (
        main(["validate", write(tmp_path, f"model: {{tiny: {{}}, max_response_tokens: 64, {limits}}}\n{taskset}")]) == 0
    )
    said = capsys.readouterr().out
    assert "the prompts of 2 of 4 records have more than 64 tokens, and these tasks will fail" in said
    file = write(tmp_path, f"model: {{tiny: {{}}, max_response_tokens: 64, {limits}}}\n{taskset}")
    assert (
        main(["validate", file, "model.enable_prompt_truncation=true", "buffer.taskset.format.reply_prefix='11'"]) == 0
    )
    assert "the prompts of 3 of 4 records have more than 64 tokens, and these tasks will not" in capsys.readouterr().out
    assert main(["validate", file, "model.enable_prompt_truncation=false"]) == 0
    assert "tokens" not in capsys.readouterr().out, "the longest fits into max_model_len"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    byte_codec()._tokenizer.save_pretrained(folder)  # its template adds tokens
    text = f"model: {{model_path: '{folder}', max_response_tokens: 64, {limits}}}\n{taskset}"
    assert main(["validate", write(tmp_path, text)]) == 0
    assert "the prompts of 4 of 4 records have more than 64 tokens" in capsys.readouterr().out
    assert main(["validate", write(tmp_path, text), "model.max_prompt_tokens=400"]) == 0
    assert "tokens" not in capsys.readouterr().out


def test_a_long_system_prompt_makes_the_prompts_of_short_records_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    taskset = f"{{name: mine, path: {tmp_path}/t.jsonl, format: {{system_prompt: {'x' * 64}}}}}"
    text = f"model: {{tiny: {{}}, max_prompt_tokens: 64}}\nbuffer: {{taskset: {taskset}}}"
    assert main(["validate", write(tmp_path, text)]) == 0
    assert "the prompts of 1 of 1 records have more than 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workflow", "system_prompt", "is_long"),
    [
        ("simple_workflow", None, False),
        ("math_answer_workflow", None, True),
        ("math_answer_workflow", "short", False),
        ("async_math_workflow", None, True),
        ("math_boxed_workflow", None, True),
        ("frozen_lake_game_workflow", None, False),
    ],
)
def test_the_system_prompt_of_a_workflow_counts(
    tmp_path: Path, workflow: str, system_prompt: str | None, is_long: bool
) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    shape = {"system_prompt": system_prompt}
    taskset = {"name": "mine", "path": f"{tmp_path}/t.jsonl", "workflow": workflow, "format": shape}
    config = load_config({"model": {"tiny": {}, "max_prompt_tokens": 64}, "buffer": {"taskset": taskset}})
    lines = count_long_prompts(config, tasksets(config))
    assert ["the prompts of 1 of 1 records have more than 64 tokens" in line for line in lines] == [True] * is_long


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", write(tmp_path, "model: {model_path: models/mine}")]) == 0, "may be a hub id"
    (tmp_path / "models").mkdir()
    assert main(["validate", write(tmp_path, "model: {model_path: models/mine}")]) == 2


def test_a_blob_store_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = "model: {tiny: {}}\nbuffer: {taskset: {storage_type: queue}}"
    assert main(["validate", write(tmp_path, queue), f"broker.blob_store={tmp_path}/blobs"]) == 0
    assert f"blob store file://{tmp_path}/blobs/run: can be written and read" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["validate", write(tmp_path, queue), f"broker.blob_store={tmp_path}/file"]) == 2
    assert "broker.blob_store: " in capsys.readouterr().err
    assert main(["validate", write(tmp_path, queue), "broker.blob_store=nosuch://x"]) == 2
    assert "no library opens nosuch://" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(GREEDY_WORKFLOWS))
def test_a_greedy_run_is_made_and_used(own: Path, name: str) -> None:
    taskset = f"storage_type: queue, workflow: {name}, workflow_args: {{greedy_baseline: true}}"
    assert main(["validate", with_own(own, taskset, algorithm="{algorithm_type: remax}")]) == 0


@pytest.mark.parametrize("mode", ["train", "bench"])
def test_a_mode_that_reads_no_training_taskset_needs_no_greedy_runs_of_it(own: Path, mode: str) -> None:
    config = load_config(with_own(own, algorithm="{algorithm_type: remax}"))
    with pytest.raises(ConfigError, match="greedy_baseline: true"):
        check_greedy_runs(config)
    assert check_greedy_runs(config.model_copy(update={"mode": mode})) == []


@pytest.mark.parametrize("model", ["{tiny: {chat_template: ''}}", "{tiny: {}, router_replay: true}"])
def test_the_checks_of_a_model_that_import_torch_are_told(own: Path, model: str) -> None:
    assert not imports_torch(load_config(with_own(own)))
    assert imports_torch(load_config(with_own(own, model=model)))


@pytest.mark.parametrize("names", ["[v_prj]", "[q_proj, v_prj]"])
def test_layers_that_the_model_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    text = "buffer: {taskset: {storage_type: queue}}\nmodel: {tiny: {}, lora: {target_modules: "
    assert main(["validate", write(tmp_path, f"{text}{names}}}}}")]) == 2
    assert "the model has no layer 'v_prj'; did you mean 'v_proj'?" in capsys.readouterr().err
    assert main(["validate", write(tmp_path, f"{text}[q_proj, v_proj]}}}}")]) == 0


@pytest.mark.parametrize(
    ("template", "rendering", "has_row"),
    [("qwen3", "family hermes; renderers: qwen3", True), ("smollm2", "family hermes; chat template, because", False)],
)
@pytest.mark.parametrize("command", ["validate", "doctor"])
def test_the_renderer_of_a_model_is_shown(
    command: str, template: str, rendering: str, has_row: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tokenizer_of(template).save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    assert main([command, write(tmp_path, f"model: {{model_path: '{folder}'}}")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert rendering in output
    assert ("name its family with model.family" in output) is not has_row
