"""The conversion of scripts/get-smollm2, on a tiny model of the same make."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.models.tiny_gguf import make_model, write_gguf
from trinity_mq.models.errors import ModelError
from trinity_mq.models.gguf_folder import convert

CHAT = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 12 +  345?"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(make_model(), tmp_path_factory.mktemp("source") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made by the program as the script calls it."""
    made = tmp_path_factory.mktemp("made") / "models" / "tiny"
    command = [sys.executable, "-m", "trinity_mq.models.gguf_folder", source, made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in made.parent.iterdir()] == ["tiny"], "nothing half made is left"
    return made


def test_it_computes_what_the_source_computes(folder: Path) -> None:
    model, ids = make_model(), torch.tensor([[1, 50, 60, 70, 2]])
    made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_tokens_end_and_are_cut_as_the_model_was_trained(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {name: getattr(tokenizer, name) for name in ends} == ends
    generation = json.loads((folder / "generation_config.json").read_text())
    assert {name: generation[name] for name in ends} == ends
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nWhat is 12 +  345?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:1] == ["<|im_start|>"]
    assert "user" in tokens
    assert tokens[tokens.index("+") + 1 :][:4] == ["ĠĠ", "3", "4", "5"], (
        "each digit by itself, the spaces before it too"
    )


HEAD = b"GGUF" + bytes((3, 0, 0, 0, *[0] * 8, 1, *[0] * 7))
"""The beginning of a GGUF file: the magic, the version, and the numbers of its tensors and of its metadata."""


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"", "empty file"), (b"PK34" * 9, "magic"), (HEAD, "out of bounds")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    gguf = tmp_path / "tiny.gguf"
    if content is not None:
        gguf.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{gguf} cannot be read: .*{why}.*; give the path of a whole GGUF file"):
        convert(gguf, tmp_path / "made")


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "memory", "why"),
    [(1000, 1 << 40, "0.0 GB free, and the model needs 0.1 GB"), (1 << 40, 1000, "0.0 GB of memory is available")],
)
def test_too_little_room_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, memory: int, why: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda where: Usage(free, 0, free))
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("Memory", "available")(memory))
    with pytest.raises(ModelError, match=why):
        convert(source, tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_program_says_in_one_line_why_it_cannot(source: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    command = [sys.executable, "-m", "trinity_mq.models.gguf_folder", source, tmp_path / "models" / "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: \S+tiny cannot be written: [\w ]+\n", done.stderr)
