"""Whether a version of vLLM has what ``engines/vllm/api.py`` uses, read from its source without importing it.

``python -m tests.vllm.interface FOLDER`` takes the folder of an unpacked wheel (for a GPU or a CPU), prints what is
missing, and exits with 1 if anything is. vLLM need not be installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from trinity_mq.config import ModelConfig, RolloutModelConfig
from trinity_mq.engines.generation.request import GenerationRequest
from trinity_mq.engines.vllm import api

ROUTES = (
    api.GENERATE,
    api.HEALTH,
    api.METRICS,
    api.PAUSE,
    api.RESUME,
    api.START_UPDATE,
    api.UPDATE,
    api.FINISH_UPDATE,
    api.LOAD_ADAPTER,
    api.UNLOAD_ADAPTER,
)
PROTOCOL = "entrypoints/scale_out/token_in_token_out/protocol.py"
ANSWERED = {
    "GenerateTokensResponse": {"choices", "prompt_logprobs"},
    "GenerateTokensChoice": {"index", "token_ids", "logprobs", "finish_reason", "weight_versions"},
    "GenerateLogProbsContent": {"token_id", "logprob", "top_logprobs"},
}
"""Fields of answers that are read, by vLLM's class."""


def commands() -> Iterator[list[str]]:
    """Yield server commands that together have every option: on a CPU and a GPU, with full weights and adapters."""
    model = ModelConfig.model_validate(
        {"tiny": {}, "dtype": "bfloat16", "trust_remote_code": True, "router_replay": True}
    )
    for cpu in (True, False):
        for cache in (None, 2**30):
            settings = {"enforce_eager": True, "kv_cache_memory_bytes": cache}
            rollout = RolloutModelConfig.model_validate({"engine": "vllm", "vllm": settings})
            for room in (None, api.AdapterRoom(8, 2, ("q_proj",))):
                yield api.server_command(Path("/model"), Path("/socket"), model, rollout, 64, cpu=cpu, room=room)


def environment() -> set[str]:
    rollout = RolloutModelConfig(engine="vllm")
    names = chain(*(api.server_environment(rollout, 1, cpu=True, adapters=adapters) for adapters in (True, False)))
    return {name for name in names if name.startswith("VLLM_")}


def missing(vllm: Path) -> list[str]:
    """Return what the package folder ``vllm`` lacks, a line for each."""
    return list(chain(_options(vllm), _environment(vllm), _routes(vllm), _worker(vllm), _bodies(vllm), _metrics(vllm)))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _classes(tree: ast.AST) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Return the annotated fields of a class and of its bases in the same file."""
    if name not in classes:
        return set()
    found = classes[name]
    fields = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields.union(*(_fields(classes, base.id) for base in found.bases if isinstance(base, ast.Name)))


def _options(vllm: Path) -> Iterator[str]:
    known: set[str] = set()
    for path in (vllm / "engine" / "arg_utils.py", *(vllm / "entrypoints").rglob("cli_args.py")):
        tree = _tree(path)
        known |= {text.lstrip("-") for text in _strings(tree) if text.startswith("--")}
        classes = _classes(tree)
        for name in classes:
            if name.endswith("FrontendArgs"):
                known |= {field.replace("_", "-") for field in _fields(classes, name)}
    used = {word.lstrip("-") for command in commands() for word in command if word.startswith("--")}
    yield from (f"option --{name}" for name in sorted(used - known))


def _environment(vllm: Path) -> Iterator[str]:
    yield from (f"environment variable {name}" for name in sorted(environment() - _strings(_tree(vllm / "envs.py"))))


def _routes(vllm: Path) -> Iterator[str]:
    known = set().union(*(_strings(_tree(path)) for path in (vllm / "entrypoints").rglob("*.py")))
    yield from (f"route {path}" for path in ROUTES if path not in known)
    router = _tree(vllm / "entrypoints" / "rl" / "online" / "api_router.py")
    pauses = [
        node for node in ast.walk(router) if isinstance(node, ast.AsyncFunctionDef) and node.name == "pause_generation"
    ]
    arguments = {argument.arg for node in pauses for argument in node.args.args}
    yield from (f"argument {name} of {api.PAUSE}" for name in ("mode", "clear_cache") if name not in arguments)


def _worker(vllm: Path) -> Iterator[str]:
    """Names that our worker side imports, and abstract methods that our backend does not have."""
    ours = _tree(Path(api.__file__))
    for node in ast.walk(ours):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            place = vllm.joinpath(*str(node.module).split(".")[1:])
            source = _tree(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
            known = set(_defined(source)) | _strings(source)  # strings: a module that imports on demand
            yield from (f"{alias.name} in {node.module}" for alias in node.names if alias.name not in known)
    base = _classes(_tree(vllm / "distributed" / "weight_transfer" / "base.py")).get("WeightTransferEngine")
    if base is None:
        yield "class WeightTransferEngine"
        return
    abstract = {node.name for node in base.body if isinstance(node, ast.FunctionDef) and _is_abstract(node)}
    backend = {node.name for node in _classes(ours)["Backend"].body if isinstance(node, ast.FunctionDef)}
    yield from (f"our implementation of WeightTransferEngine.{name}" for name in sorted(abstract - backend))
    has = {node.name for node in base.body if isinstance(node, ast.FunctionDef)}
    yield from (f"method WeightTransferEngine.{name}" for name in sorted(backend - has))


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in function.decorator_list)


def _bodies(vllm: Path) -> Iterator[str]:
    protocol = _classes(_tree(vllm / PROTOCOL))
    sampling = _fields(_classes(_tree(vllm / "sampling_params.py")), "SamplingParams")
    bodies = (
        api.generate_body(GenerationRequest([1], 1, seed=1), "salt", "adapter"),
        api.canary_body([1, 2], "salt", "adapter"),
        api.token_score_body([1], 2, 0.5, "salt"),
    )
    for field in sorted(set().union(*bodies) - _fields(protocol, "GenerateRequest")):
        yield f"field {field} of a request"
    for field in sorted(set().union(*(body["sampling_params"] for body in bodies)) - sampling):
        yield f"sampling parameter {field}"
    for name, fields in ANSWERED.items():
        yield from (f"field {field} of {name}" for field in sorted(fields - _fields(protocol, name)))
    if "head_dtype" not in _strings(_tree(vllm / "config" / "model.py")):
        yield "head_dtype of the model's configuration"


def _metrics(vllm: Path) -> Iterator[str]:
    known = _strings(_tree(vllm / "v1" / "metrics" / "loggers.py"))
    yield from (f"metric {name}" for name in api.USE.values() if name.removesuffix("_total") not in known)


if __name__ == "__main__":
    [folder] = sys.argv[1:]
    package = Path(folder) / "vllm" if (Path(folder) / "vllm").is_dir() else Path(folder)
    lacks = missing(package)
    sys.stdout.write("".join(f"missing: {line}\n" for line in lacks) or f"{package} has everything that is used\n")
    sys.exit(bool(lacks))
