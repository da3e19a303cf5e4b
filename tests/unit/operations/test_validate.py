from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.operations.validate import GREEDY_WORKFLOWS
from trinity_mq.runtime import plugins
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


QUEUE = "model: {{tiny: {{}}}}\nbuffer: {{taskset: {{storage_type: queue, {}}}}}"
REMAX = QUEUE + "\nalgorithm: {{algorithm_type: remax}}"
GREEDY = QUEUE.format("workflow: math_workflow, workflow_args: {greedy_baseline: true}") + "\n"
NO_TEMPLATE = "model.tiny has no chat template, so it answers no chat requests, and workflow 'async_simple_workflow'"


OUTSIDERS = "model: {tiny: {}}\nbuffer: {taskset: {storage_type: queue}}\noutsiders: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            OUTSIDERS + "{workflows: {math_workflw: []}}",
            "outsiders: unknown workflow 'math_workflw'; did you mean 'math_",
        ),
        (
            OUTSIDERS + "{rewards: {char_mach: []}}",
            "outsiders: unknown reward function 'char_mach'; did you mean 'char_",
        ),
        ("model: {tiny: {}}\nbufer: {}", "did you mean 'buffer'?"),
        ("model: {tiny: {}}\nbuffer: {taskset: {path: /no/such/file.jsonl}}", "/no/such/file.jsonl cannot be read"),
        ("model: {tiny: {}}\nbuffer: {taskset: {storage_type: synthetic, path: ops4}}", "did you mean 'ops3'?"),
        (
            "model: {tiny: {}}\nbuffer: {taskset: {reward_fn: char_mach, storage_type: queue}}",
            "did you mean 'char_match'",
        ),
        (
            "model: {tiny: {}}\nbuffer: {taskset: {storage_type: queue, reward_fn: gsm8k, reward_fn_args: {x: 1}}}",
            "reward_fn_args {'x': 1}",
        ),
        (
            "model: {tiny: {}}\noperator: {operators: [{name: reward_filtr}]}",
            "did you mean 'reward_filter'",
        ),
        (REMAX.format("workflow: math_workflow"), "set buffer.taskset.workflow_args.greedy_baseline: true"),
        (GREEDY + "algorithm: {algorithm_type: grpo}", "the estimator of grpo has no use for a greedy run"),
        ("model: {model_path: /no/such/model}", "model.model_path /no/such/model: no such folder"),
        ("model: {tiny: {chat_template: ''}}\nbuffer: {taskset: {storage_type: synthetic, path: ops3}}", NO_TEMPLATE),
        ("model: {tiny: {}, device: cuda}", "model.device is cuda, and torch sees no CUDA device here"),
        (
            "model: {tiny: {}}\nsynchronizer: {backend: nccl}",
            "synchronizer.backend is nccl, which sends weights between GPUs, and torch sees no GPU here; use",
        ),
        (
            "model: {tiny: {}, device: cpu}\nsynchronizer: {sync_method: nccl}",
            "synchronizer.backend is nccl, which sends weights between GPUs, and model.device is cpu; use",
        ),
        ("model: {tiny: {}}\nexplorer: {rollout_model: {engine: vllm}}", "vLLM is not installed here; install"),
        (
            "model: {tiny: {}}\nalgorithm: {optimizer: {optimizer_type: adamw_8bit}}",
            "optimizer_type is adamw_8bit, and neither bitsandbytes nor torchao is installed: install one of them",
        ),
        ("model: {tiny: {}}\nalgorithm: {optimizer: {optimizer_type: muon}}", "is muon, which came with torch 2.9"),
        (
            "model: {tiny: {}}\nalgorithm: {optimizer: {offload: true, optimizer_type: adamw_8bit}}",
            "offload is true with optimizer_type adamw_8bit",
        ),
        (QUEUE.format("workflow: math_boxed_workflow, workflow_args: {with_thing: true}"), "did you mean 'with_think'"),
        (
            QUEUE.format("workflow: math_boxed_workflow, workflow_args: {with_think: 7}"),
            "workflow_args.with_think is 7",
        ),
        (
            QUEUE.format("workflow_args: {with_think: true}"),
            "workflow_args.with_think does not exist; there are greedy_baseline",
        ),
        (
            "model: {tiny: {}}\noperator: {operators: [{name: reward_filter, args: {treshold: 1}}]}",
            "operator.operators: operator 'reward_filter' cannot be made with args {'treshold': 1}",
        ),
        ("[]", "holds a list"),
    ],
)
def test_bad_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delattr("torch.optim.Muon", raising=False)
    monkeypatch.setattr("trinity_mq.training.optimizers.find_spec", lambda name: None)
    monkeypatch.setattr("trinity_mq.engines.vllm.api.DISTRIBUTIONS", ("no-such-distribution",))
    assert main(["validate", write(tmp_path, text)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


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
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["validate", write(tmp_path, text)]) == 0
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert main(["validate", write(tmp_path, text)]) == 0
    (folder / "config.json").unlink()
    assert main(["validate", write(tmp_path, text)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err


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
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    byte_codec()._tokenizer.save_pretrained(folder)  # its template adds tokens
    text = f"model: {{model_path: '{folder}', max_response_tokens: 64, {limits}}}\n{taskset}"
    assert main(["validate", write(tmp_path, text)]) == 0
    assert "the prompts of 4 of 4 records have more than 64 tokens" in capsys.readouterr().out
    assert main(["validate", write(tmp_path, text), "model.max_prompt_tokens=400"]) == 0
    assert "tokens" not in capsys.readouterr().out


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


MINE = """
from trinity_mq.workflows import AsyncStepWiseRewardWorkflow, Workflow

class Mine(Workflow):
    pass

class Steps(AsyncStepWiseRewardWorkflow):
    pass
"""


OPERATORS = """
from trinity_mq.operators import ExperienceOperator, ExperienceOperatorV1

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


def with_workflow(folder: Path, name: str, more: str = "") -> str:
    (folder / "plugins").mkdir()
    (folder / "plugins" / "validated_workflows.py").write_text(MINE)
    taskset = f"{{name: mine, storage_type: queue, workflow: {name}}}"
    text = f"model: {{tiny: {{}}}}\nplugin_dirs: ['{folder / 'plugins'}']\nbuffer: {{taskset: {taskset}}}\n{more}"
    return write(folder, text)


@pytest.fixture
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_added", {})
    yield
    for name in ("validated_workflows", "validated_operators", "validated_own"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_path_as_before")
def test_a_workflow_of_a_plug_in_folder_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", with_workflow(tmp_path, "validated_workflows.Mine")]) == 0
    assert f"workflow Mine from {tmp_path}/plugins/validated_workflows.py" in capsys.readouterr().out


@pytest.mark.usefixtures("_path_as_before")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Mine", "taskset 'mine': unknown workflow 'Mine'; known: "),
        ("Mine", "(in plugin_dirs there is 'validated_workflows.Mine')"),
        ("math_workflw", "did you mean 'math_workflow'"),
        ("validated_workflows.Steps", "set explorer.rollout_model.enable_history: true"),
    ],
)
def test_a_workflow_that_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main(["validate", with_workflow(tmp_path, name)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("_path_as_before")
@pytest.mark.parametrize(
    ("name", "said"),
    [("Plain", "Plain.process is a plain function"), ("Awaited", "Awaited.process is an async function"), ("Good", "")],
)
def test_an_operator_of_the_wrong_form_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    path = with_workflow(
        tmp_path, "simple_workflow", f"operator: {{operators: [{{name: validated_operators.{name}}}]}}"
    )
    (tmp_path / "plugins" / "validated_operators.py").write_text(OPERATORS)
    assert main(["validate", path]) == (2 if said else 0)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(GREEDY_WORKFLOWS))
def test_a_greedy_run_is_made_and_used(tmp_path: Path, name: str) -> None:
    given = f"workflow: {name}, workflow_args: {{greedy_baseline: true}}"
    assert main(["validate", write(tmp_path, REMAX.format(given))]) == 0


OWN = """
import sys
from pydantic import field_validator
from trinity_mq.operators import ExperienceOperator
from trinity_mq.workflows import Arguments, Workflow

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
"""
OWN_LINES = {line: number for number, line in enumerate(OWN.splitlines(), 1)}


def line_of(code: str) -> str:
    """Return file and line of ``code`` in the user's own module, as a message ends with them."""
    [number] = [number for line, number in OWN_LINES.items() if line.strip() == code]
    return f"(validated_own.py:{number})"


def with_own(folder: Path, more: str, taskset: str = "storage_type: queue") -> str:
    (folder / "plugins").mkdir()
    (folder / "plugins" / "validated_own.py").write_text(OWN)
    where = f"model: {{tiny: {{}}}}\nplugin_dirs: ['{folder / 'plugins'}']\n"
    return write(folder, f"{where}buffer: {{taskset: {{name: t, {taskset}}}}}\n{more}")


@pytest.mark.usefixtures("_path_as_before")
@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("surrogate: {kind: validated_own.min}", "has no 'min'; did you mean 'mine'?"),
        ("surrogate: {kind: validated_on.mine}", "module 'validated_on' cannot be imported"),
        ("surrogate: {kind: validated_own.mine, args: {slop: 2}}", "takes no argument 'slop'"),
        ("surrogate: {kind: validated_own.add}", "takes 1 positional arguments, wanted 3"),
        ("correction: [{kind: validated_own.weight}]", "has no 'weight'; did you mean 'weigh'?"),
        ("correction: [{kind: validated_own.weigh, args: {cuts: 2}}]", "takes no argument 'cuts'"),
        ("estimator: {kind: validated_own.advantage}", "has no 'advantage'; did you mean 'advantages'?"),
        ("estimator: {kind: validated_own.advantages, args: {powr: 2}}", "unexpected keyword argument 'powr'"),
    ],
)
def test_an_own_loss_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, said: str
) -> None:
    assert main(["validate", with_own(tmp_path, f"algorithm: {{{algorithm}}}")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("trinity-mq validate: algorithm: ")


@pytest.mark.usefixtures("_path_as_before")
def test_an_own_loss_that_can_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "surrogate: {kind: validated_own.mine, args: {slope: 2}}, correction: [{kind: validated_own.weigh}]"
    assert main(["validate", with_own(tmp_path, f"algorithm: {{{own}}}")]) == 0
    out = capsys.readouterr().out
    assert "algorithm: your own validated_own.mine\nalgorithm: your own validated_own.weigh\n" in out


@pytest.mark.usefixtures("_path_as_before")
@pytest.mark.parametrize(
    ("more", "taskset", "said"),
    [
        (
            "operator: {operators: [{name: validated_own.Raises, args: {path: a.txt}}]}",
            "storage_type: queue",
            "operator 'validated_own.Raises' with args {'path': 'a.txt'} cannot be used: KeyError: 'a.txt' "
            + line_of("self.lines = {}[path]"),
        ),
        (
            "operator: {operators: [{name: reward_filter}, {name: validated_own.Leaves}]}",
            "storage_type: queue",
            "SystemExit: no licence " + line_of('sys.exit("no licence")'),
        ),
        (
            "",
            "storage_type: queue, reward_fn: validated_own.Reward",
            "taskset 't': reward function 'validated_own.Reward' cannot be used: RuntimeError: no judge "
            + line_of('raise RuntimeError("no judge")'),
        ),
        (
            "",
            "storage_type: synthetic, path: max3, data_selector: {selector_type: validated_own.Selector}",
            "taskset 't': selector 'validated_own.Selector' cannot be used: OSError: no index "
            + line_of('raise OSError("no index")'),
        ),
        (
            "",
            "storage_type: queue, workflow: validated_own.Mine, workflow_args: {level: 2}",
            "taskset 't': workflow 'validated_own.Mine' cannot be used: KeyError: 2 " + line_of("return {1: 1}[value]"),
        ),
        (
            "",
            "storage_type: queue, workflow: tool_agent_workflow, workflow_args: {tools: [validated_own.ad]}",
            "module 'validated_own' has no 'ad'; did you mean 'add'?",
        ),
    ],
)
def test_own_code_that_raises_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, taskset: str, said: str
) -> None:
    assert main(["validate", with_own(tmp_path, more, taskset)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("_path_as_before")
def test_a_module_that_ends_the_process_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_own(tmp_path, "operator: {operators: [{name: validated_own.Raises}]}")
    (tmp_path / "plugins" / "validated_own.py").write_text("import sys\nsys.exit('wrong machine')\n")
    assert main(["validate", path]) == 2
    assert "cannot be imported: SystemExit: wrong machine (validated_own.py:2)" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["[v_prj]", "[q_proj, v_prj]"])
def test_layers_that_the_model_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    text = "buffer: {taskset: {storage_type: queue}}\nmodel: {tiny: {}, lora: {target_modules: "
    assert main(["validate", write(tmp_path, f"{text}{names}}}}}")]) == 2
    assert "the model has no layer 'v_prj'; did you mean 'v_proj'?" in capsys.readouterr().err
    assert main(["validate", write(tmp_path, f"{text}[q_proj, v_proj]}}}}")]) == 0
