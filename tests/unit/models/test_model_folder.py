import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.engines.generation.text import TextCodec, TextError
from trinity_mq.engines.torch.generator import TextGenerator
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import ensure_model_folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_same_seed_same_bytes_other_seed_other_weights(model_config: ModelConfig, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again = ensure_model_folder(model_config, tmp_path / "deep" / "again", 0)
    assert torch.equal(torch.random.get_rng_state(), before), (
        "making a model must not disturb the caller's random state"
    )
    assert content(again) == content(folder)
    other = ensure_model_folder(model_config, tmp_path / "other", 1)
    assert content(other)["model.safetensors"] != content(folder)["model.safetensors"]
    assert content(other)["tokenizer.json"] == content(folder)["tokenizer.json"]


def test_existing_folder_is_kept_and_one_of_other_settings_refused(model_config: ModelConfig, tmp_path: Path) -> None:
    folder = ensure_model_folder(model_config, tmp_path / "model", 0)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model_folder(model_config, folder, 0) == folder
    assert ensure_model_folder(ModelConfig(model_path=str(folder)), Path("unused"), 0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ModelError, match=r"seed: 0 in the folder, 5 in the configuration"):
        ensure_model_folder(model_config, folder, 5)
    wider = ModelConfig(tiny=TinyModelConfig(hidden_size=96))
    with pytest.raises(ModelError, match=r"hidden_size: 64 in the folder, 96 in the configuration"):
        ensure_model_folder(wider, folder, 0)
    for damaged in ("", "[]", '{"tiny": 5}'):
        (folder / "recipe.json").write_text(damaged)
        with pytest.raises(ModelError, match="is not a model made by this program"):
            ensure_model_folder(model_config, folder, 0)


def test_its_files_follow_the_umask(model_config: ModelConfig, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        made = ensure_model_folder(model_config, tmp_path / "model", seed=0)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o640}, modes


def test_many_makers_at_once_leave_one_whole_folder(model_config: ModelConfig, folder: Path, tmp_path: Path) -> None:
    results: list[Path | BaseException] = []

    def make() -> None:
        try:
            results.append(ensure_model_folder(model_config, tmp_path / "model", 0))
        except BaseException as error:
            results.append(error)

    makers = [threading.Thread(target=make) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert results == [tmp_path / "model"] * 3
    assert content(tmp_path / "model") == content(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tokenizer_round_trip_and_unknown_text(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "+372=7,-0123456789"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert min(ids) >= 2
    assert tokenizer.decode(ids) == text
    with pytest.raises(Exception, match="vocabulary"):
        tokenizer("a b")
    codec = TextCodec.load(folder)
    assert codec.encode(text) == ids
    assert codec.stop_ids == {1}
    with pytest.raises(TextError, match=r"holds '\\n a', which the vocabulary of 16 tokens does not cover"):
        codec.encode("+3 a\n7")


@pytest.mark.parametrize(
    ("model_path", "says"),
    [
        ("/no/such/folder", "no such folder"),
        ("./nor/this", "no such folder"),
        ("not a hub id", "neither a folder nor a valid hub id"),
        ("some/model", "the hub cannot be reached"),
        ("./empty", r"config\.json cannot be read"),
        ("./broken", r"config\.json cannot be read: Expecting property name"),
    ],
)
def test_what_is_not_there_is_one_clear_line(
    model_path: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=says) as caught:
        ensure_model_folder(ModelConfig(model_path=model_path), Path("unused"), 0)
    assert "\n" not in str(caught.value)


class FullDevice(TorchFunctionMode):
    """A device without free memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("content", ["[1]", '{"eos_token_id": "</s>"}', "{"])
def test_a_wrong_generation_configuration_is_a_fault_of_the_model(folder: Path, tmp_path: Path, content: str) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    (copied / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read: [12] validation error"):
        TextCodec.load(copied)


def test_a_full_device_is_no_fault_of_the_model(folder: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), FullDevice():  # after a ModelError, the engine would not start again
        TextGenerator.build(ModelConfig(model_path=str(folder), device="cpu"), folder, num_threads=1)


def test_fingerprint_tells_vocabularies_and_templates_apart(folder: Path, tmp_path: Path) -> None:
    same = ensure_model_folder(ModelConfig(tiny=TinyModelConfig(hidden_size=32)), tmp_path / "same", 9)
    vocabulary = ensure_model_folder(ModelConfig(tiny=TinyModelConfig(characters="0123")), tmp_path / "vocabulary", 0)
    template = ModelConfig(tiny=TinyModelConfig(chat_template="{{ messages[0]['content'] }}="))
    templated = ensure_model_folder(template, tmp_path / "template", 0)
    prints = [TextCodec.load(path).fingerprint() for path in (folder, same, vocabulary, templated)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
