"""Table of all settings, from the models of the configuration."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trinity_mq.config import Config
from trinity_mq.config.loading.problems import sections_of

UNITS = ("seconds", "bytes", "tokens", "batches", "steps", "runs", "processes")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
HEAD = """# Settings

Written by `trinity-mq settings --out docs/settings.md` from the models in `trinity_mq/config/`; edit those.

In a YAML file the parts of a key are nested sections; on the command line a key stands with its value:
`buffer.total_steps=10`. Items of lists are counted from 0: `buffer.eval_tasksets.0.limit=8`. Values may hold
OmegaConf's interpolations: `${oc.env:NAME,default}` is an environment variable, `${model.max_model_len}` another
setting, `\\${` a plain `${`. A key that is not here is refused, except [removed keys](renamed.md#removed-settings),
which warn.
"""
FIRST_SETTINGS = {
    "model.model_path": "the model that is trained: a folder or hub id",
    "model.max_response_tokens": "length at which an answer is cut, in tokens; time and memory grow with it",
    "buffer.taskset.path": "the tasks: a file, a dataset or a generator, by `buffer.taskset.storage_type`",
    "buffer.taskset.workflow": "the code that turns a task into calls of the model and a reward",
    "buffer.taskset.reward_fn": "the judgement of an answer, for workflows that leave it to a function",
    "buffer.batch_size": "tasks in a batch, with `algorithm.repeat_times` answers each",
    "buffer.total_steps": "the length of the run",
    "algorithm.algorithm_type": "the preset of losses and advantages; `trinity-mq algorithms` lists them",
    "algorithm.repeat_times": "answers to each task; more show better which of them are good",
    "algorithm.optimizer.lr": "the size of a step; change it first if rewards do not rise, or rise and fall",
    "synchronizer.sync_interval": "batches between two syncs of weights: 1 is on-policy, more runs faster",
    "explorer.eval_interval": "batches between two evaluations on `buffer.eval_tasksets`",
}
"""The settings that a new user changes first, in this order, with the meaning of a change: most examples set them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the reference."""

    key: str
    """Section names and setting name, joined by dots. ``<n>`` stands for the index of a list item."""
    type: str
    default: str
    unit: str
    meaning: str


def page() -> str:
    """Return the reference of all settings in Markdown."""
    defaults = {setting.key: setting.default for setting in all_settings()}
    parts = [HEAD, "## Twelve to try first\n", "| setting | default | what it changes |", "|---|---|---|"]
    parts += [f"| `{key}` | {defaults[key]} | {change} |" for key, change in FIRST_SETTINGS.items()]
    parts += [""]
    for title, description, section_settings in tables(Config, "", {}):
        rows = [
            f"| `{setting.key}` | {setting.type} | {setting.default} | {setting.unit} | {setting.meaning} |"
            for setting in section_settings
        ]
        parts += [f"## {title or 'Top level'}\n", f"{description}\n", "| setting | type | default | unit | meaning |"]
        parts += ["|---|---|---|---|---|", *rows, ""]
    return "\n".join(parts)


NAMING = {"kind", "selector_type"}
"""Discriminator fields: each tells apart the members of a union of sections."""


def all_settings() -> list[Setting]:
    """Return every setting of a configuration, section by section."""
    return [setting for _, _, section_settings in tables(Config, "", {}) for setting in section_settings]


def tables(
    model: type[BaseModel], prefix: str, described: dict[type[BaseModel], str]
) -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield (key prefix, description, settings) of a section and of its subsections.

    Args:
        model: The model class of the section.
        prefix: Prefix of the section's keys.
        described: Key under which each model class was described first. Later uses of the class refer to that key.
    """
    meanings, entries, inner = _docstrings(model), [], []
    for name, field in model.model_fields.items():
        if name in NAMING and len(get_args(field.annotation)) == 1:
            continue  # a discriminator with a single value is not a choice
        section, key = next(iter(sections_of(field.annotation)), None), f"{prefix}{name}"
        if kinds := _kinds(field.annotation):
            per_item = " each" if get_origin(field.annotation) is tuple else ""
            meaning = _plain(meanings.get(name, ""))
            discriminator = _discriminator(kinds[0])
            entries.append(Setting(key, f"section{per_item}, by its `{discriminator}`", _default(field), "", meaning))
            entries += [_kind_setting(key, kind) for kind in kinds]
            continue
        if section is None:
            entries.append(_setting(key, field, meanings.get(name, "")))
            continue
        is_list = get_origin(field.annotation) is tuple
        is_new = section not in described
        if is_new:
            described[section] = key
            inner.append((section, f"{key}.<n>." if is_list else f"{key}."))
        if is_list or not is_new or (not field.is_required() and field.get_default(call_default_factory=True) is None):
            entries.append(_setting(key, field, meanings.get(name, ""), described[section]))
    yield prefix.rstrip("."), _plain(inspect.getdoc(model) or ""), entries
    for section, path in inner:
        yield from tables(section, path, described)


def _kind_setting(key: str, model: type[BaseModel]) -> Setting:
    """Return the entry for one member of a union of sections."""
    discriminator = _discriminator(model)
    fields = {name: field for name, field in model.model_fields.items() if name != discriminator}
    kind = model.model_fields[discriminator]
    name = "a dotted path" if kind.is_required() else kind.default
    shown = [f"`{name}` {_setting(name, field, '').type} (default {_default(field)})" for name, field in fields.items()]
    return Setting(
        f"{key}.{discriminator}={name}", "; ".join(shown) or "no fields", "", "", _plain(inspect.getdoc(model) or "")
    )


def _setting(key: str, field: FieldInfo, meaning: str, section: str = "") -> Setting:
    names = [row for constraint in field.metadata for row in getattr(getattr(constraint, "func", None), "names", ())]
    kind = ", ".join([*(f"`{name}`" for name in names), "a dotted path"]) if names else _type(field.annotation)
    if section and section != key:
        kind = f"{kind} as `{section}`"
    return Setting(
        key=key,
        type=", ".join([kind, *_bounds(field.metadata)]),
        default=_default(field),
        unit=_unit(meaning) if {int, float} & {field.annotation, *get_args(field.annotation)} else "",
        meaning=_plain(meaning),
    )


def _unit(meaning: str) -> str:
    """Return the unit named in the first sentence of a description, or an empty string."""
    first_sentence = re.sub(r"``.*?``", "", meaning).lower().split(". ")[0]
    return next((word for word in re.findall(r"[a-z]+", first_sentence) if word in UNITS), "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    shown = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True, width=1000)
    return f"`{shown.removesuffix('...' + chr(10)).strip()}`"


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in {Union, types.UnionType}:
        return " or ".join(_type(part) for part in inner)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}" if inner[-1] is Ellipsis else f"list of {len(inner)} {_type(inner[0])}"
    if origin is dict:
        return f"map of {_type(inner[1])}"
    if origin is Annotated:
        limits = [item for constraint in inner[1:] for item in getattr(constraint, "metadata", ())]
        return ", ".join([_type(inner[0]), *_bounds(limits)])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = str(getattr(annotation, "__name__", annotation))
    return {"NoneType": "null", "str": "text", "Any": "anything"}.get(name, name)


def _bounds(metadata: Iterable[Any]) -> list[str]:
    limits = [(sign, getattr(constraint, name, None)) for constraint in metadata for name, sign in BOUNDS.items()]
    return [f"{sign} {limit:,}".replace(",", " ") for sign, limit in limits if limit is not None]


def _discriminator(model: type[BaseModel]) -> str:
    return next(name for name in model.model_fields if name in NAMING)


def _kinds(annotation: Any) -> list[type[BaseModel]]:
    """Return the members of a union of sections that have a field named in :data:`NAMING`, or an empty list if there
    are fewer than two.
    """
    models = [model for model in sections_of(annotation) if NAMING & model.model_fields.keys()]
    return models if len(models) > 1 else []


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the attribute docs of a model and of its base models by field name."""
    texts: dict[str, str] = {}
    for cls in reversed([base for base in model.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(declared, ast.ClassDef)
        for field, text in zip(declared.body, declared.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    texts[name] = docstring
    return texts


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())
