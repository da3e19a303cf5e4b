"""Model folders: a small model generated here, an existing folder, or a model downloaded by its hub id.

The import is light: torch and transformers are loaded only to generate a folder or to build a model without weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_mq.config import ModelConfig, TinyModelConfig
from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.process import apply_umask

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
_random_state = threading.Lock()
"""Guards torch's global random state, from which the weights are drawn."""

CONFIG_FILE = "config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
LAYER_KEYS, MOST_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4096
"""Keys of the number of layers in ``config.json``, and the maximum number. A damaged file with more layers would fill
the host memory of each process that reads it.
"""
RECIPE = "recipe.json"
"""Name of the file with the settings from which a folder was generated. A folder with other settings is not reused."""


def ensure_model_folder(config: ModelConfig, folder: Path, seed: int) -> Path:
    """Return a Hugging Face folder with configuration, tokenizer and weights for ``config``.

    ``tiny``: the result is ``folder``, generated now if it does not exist. The same configuration and seed give the
    same bytes. The folder appears complete or not at all, also when several processes generate it at the same time.
    ``model_path``: the result is that folder, or the local snapshot of that hub id; ``folder`` and ``seed`` are not
    used.

    Raises:
        ModelError: The folder is not available; the message is one line with the reason.
    """
    if config.tiny is None:
        return _existing(str(config.model_path))
    dense = set() if config.tiny.num_experts else {"num_experts", "num_experts_per_tok"}
    # release 0.2.0 writes a dense model's recipe without the keys of experts
    recipe: dict[str, Any] = {"seed": seed, "tiny": config.tiny.model_dump(mode="json", exclude=dense)}
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        try:
            part.mkdir(parents=True)
            _make(config.tiny, part, seed)
            (part / RECIPE).write_text(json.dumps(recipe, indent=1, sort_keys=True))
            _publish(part, folder)
        except OSError as error:
            raise ModelError(f"model folder {folder} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    _check_recipe(folder, recipe)
    return folder


def _publish(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        # another process was first: its folder is equally good, and the recipe check verifies that
        if not folder.is_dir():
            raise


def _check_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    try:
        stored = json.loads((folder / RECIPE).read_text())
        if not (isinstance(stored, dict) and isinstance(stored.get("tiny"), dict)):
            raise ValueError(f"{RECIPE} holds {str(stored)[:100]!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{folder} exists but is not a model made by this program ({error}); remove it or use another run_dir"
        ) from error
    if stored != recipe:
        new, old = {**recipe["tiny"], "seed": recipe["seed"]}, {**stored["tiny"], "seed": stored.get("seed")}
        differ = ", ".join(
            f"{key}: {old.get(key)!r} in the folder, {new.get(key)!r} in the configuration"
            for key in {**new, **old}
            if old.get(key) != new.get(key)
        )
        raise ModelError(
            f"{folder} holds a model made from other settings ({differ}); remove it, use another run_dir, or undo the "
            "change"
        )


def _architecture(tiny: TinyModelConfig) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    experts = {
        "num_experts": tiny.num_experts,
        "num_experts_per_tok": tiny.num_experts_per_tok,
        "moe_intermediate_size": tiny.intermediate_size,
        "norm_topk_prob": True,
    }
    # Qwen3, not Qwen2: AutoTokenizer replaces the tokenizer of a qwen2 folder by its own, which loses characters.
    return (Qwen3MoeConfig if tiny.num_experts else Qwen3Config)(
        **(experts if tiny.num_experts else {}),
        vocab_size=len(tiny.characters) + 2,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.num_hidden_layers,
        num_attention_heads=tiny.num_attention_heads,
        num_key_value_heads=tiny.num_attention_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=tiny.max_position_embeddings,
        initializer_range=tiny.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def model_without_weights(config: ModelConfig, layers: int | None = None, **arguments: Any) -> Any:
    """Return a model of the configured architecture without its trained weights. The weights are random, or without
    memory on the device ``meta``. Weight files are not read.

    Args:
        config: The model.
        layers: Number of layers to build. None: all layers of the architecture.
        arguments: Arguments of ``from_config``, such as ``dtype``.

    Raises:
        ModelError: The architecture is not available on this machine; the message is one line with the reason.
        torch.OutOfMemoryError: The device has too little free memory. MemoryError and torch.AcceleratorError have the
            same cause.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = {"trust_remote_code": config.trust_remote_code}
    folder = None if config.tiny is not None else local_model_folder(str(config.model_path))
    if config.tiny is None and folder is None:
        raise ModelError(
            f"model {config.model_path} is a hub id and not downloaded yet, so its size is not known; "
            f"`hf download {config.model_path}` downloads it"
        )
    try:
        architecture = _architecture(config.tiny) if config.tiny else AutoConfig.from_pretrained(folder, **remote)
        if layers is not None:
            text = architecture.get_text_config()
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        model = AutoModelForCausalLM.from_config(architecture, **remote, **arguments)
        model.tie_weights()  # from_config does not tie weights that it does not initialise
        return model
    except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # a later start may find the device free
    except Exception as error:  # a wrong config.json raises errors of many classes
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ModelError(f"model {config.model_path}: {kind}{' '.join(str(error).split())}") from error


def empty_model(config: ModelConfig) -> Any | None:
    """Return the model without memory for its weights; None if its architecture is not available on this machine."""
    import torch

    try:
        with torch.device("meta"):
            return model_without_weights(config)
    except ModelError:  # the caller that loads the model reports the fault
        return None


def _make(tiny: TinyModelConfig, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_character_tokenizer(tiny.characters),
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=tiny.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = tiny.chat_template
    tokenizer.save_pretrained(folder)
    with _random_state, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_architecture(tiny), dtype=torch.float32)
    with no_progress_bar():
        model.save_pretrained(folder)
    apply_umask(folder)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Turn progress bars off for the block: a bar for a file of a few hundred kilobytes only disturbs the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _character_tokenizer(characters: str) -> Any:
    """Return a tokenizer of single characters. It has no unknown token, so other text raises an error instead of being
    replaced.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        PAD: PAD_ID,
        EOS: EOS_ID,
        **{character: number for number, character in enumerate(characters, start=2)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))  # not in the vocabulary, on purpose
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    return tokenizer


def local_folder(model_path: str) -> Path | None:
    """Return the folder that ``model_path`` names, or None for a hub id; downloads nothing.

    Raises:
        ModelError: ``model_path`` names a folder that does not exist.
    """
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    inside = len(folder.parts) > 1 and folder.parent.is_dir()
    if inside or folder.is_absolute() or model_path.startswith((".", "~")) or model_path.count("/") > 1:
        raise ModelError(
            f"model.model_path {model_path}: no such folder; give a Hugging Face folder or a hub id such as "
            "Qwen/Qwen3-0.6B"
        )
    return None


def configured_template(config: ModelConfig) -> str | None:
    """Return the chat template from the configuration, or None if it sets no template or an empty text.

    Raises:
        ModelError: ``chat_template_path`` cannot be read.
    """
    if config.chat_template_path is None:
        return config.custom_chat_template or None
    try:
        return Path(config.chat_template_path).expanduser().read_text(encoding="utf-8") or None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.chat_template_path {config.chat_template_path} cannot be read: {error}") from error


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in ``folder`` has a chat template, as transformers stores it; loads nothing."""
    if any(folder.glob("chat_template*")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def read_chat_template(folder: Path) -> str:
    """Return the chat template of the tokenizer in ``folder``; loads nothing. Empty: the tokenizer lacks a template or
    has several, or its files cannot be read.
    """
    try:
        if (file := folder / CHAT_TEMPLATE_FILE).is_file():
            return file.read_text(encoding="utf-8")
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return template if isinstance(template, str) else ""


def local_model_folder(model_path: str) -> Path | None:
    """Return the local folder of a model, or None for a hub id that is not downloaded yet; downloads nothing.

    Raises:
        ModelError: ``model_path`` names a folder that does not exist or holds no model.
    """
    folder = local_folder(model_path) or cached_folder(model_path, CONFIG_FILE)
    return None if folder is None else _checked(model_path, folder)


def cached_folder(hub_id: str, file: str) -> Path | None:
    """Return the snapshot of a hub id in the local cache, or None if the cache does not hold ``file``."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached_file = try_to_load_from_cache(hub_id, file)
    except HFValidationError:
        return None
    return Path(cached_file).parent if isinstance(cached_file, str) else None


def _existing(model_path: str) -> Path:
    return _checked(model_path, local_folder(model_path) or _snapshot(model_path))


def trinity_checkpoint_hint(folder: Path) -> str:
    """Return the end of an error message about a folder of a Trinity-RFT checkpoint from which no model can be loaded:
    the folder that holds the model, or the command that converts the checkpoint. Empty for other folders.
    """
    places = [folder, folder / "actor", folder.parent] if folder.name == "huggingface" else [folder, folder / "actor"]
    marks = ("model_world_size_*_rank_*.pt", "dist_ckpt", "latest_*_iteration.txt", "global_step_*")
    is_checkpoint = any(any(place.glob(mark)) for place in places for mark in marks)
    if not is_checkpoint and not (folder.name in {"actor", "huggingface"} and "global_step_" in str(folder)):
        return ""
    if any((folder / "huggingface").glob("model*.safetensors")):
        return f"; this is a checkpoint of Trinity-RFT, whose model is in {folder / 'huggingface'}"
    if any((folder / "actor" / "huggingface").glob("model*.safetensors")):
        return f"; this is a checkpoint of Trinity-RFT, whose model is in {folder / 'actor' / 'huggingface'}"
    source = folder.parent if folder.name == "huggingface" else folder
    return (
        f"; this is a checkpoint of Trinity-RFT: convert it once with `trinity-mq convert-checkpoint {source} --out "
        "NEW_FOLDER` and give the new folder"
    )


def _checked(model_path: str, folder: Path) -> Path:
    hint = trinity_checkpoint_hint(folder)
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text())
        if not isinstance(settings, dict):
            raise ValueError(f"its content is {str(settings)[:100]!r}, wanted a JSON object")
        layers = [part.get(key) for part in (settings, settings.get("text_config")) if part for key in LAYER_KEYS]
        if beyond := [count for count in layers if isinstance(count, int) and count > MOST_LAYERS]:
            raise ValueError(f"it has {beyond[0]} layers, wanted at most {MOST_LAYERS}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{folder}/{CONFIG_FILE} cannot be read: {error}"
        raise ModelError(f"model.model_path {model_path}: {reason}{hint}") from error
    if hint and not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.model_path {model_path}: {folder} holds no weights{hint}")
    return folder


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    unwanted = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]  # safetensors only
    try:
        return Path(snapshot_download(hub_id, ignore_patterns=unwanted))
    except HFValidationError:
        reason = "is neither a folder nor a valid hub id"
    except RepositoryNotFoundError:
        reason = "is not a folder, and the hub has no such public model (private ones need HF_TOKEN)"
    except LocalEntryNotFoundError:
        reason = (
            "is not a folder, not in the local cache, and the hub cannot be reached; download it first or give a folder"
        )
    # raised by several libraries (http, files, parsing); each error means that the model is not available
    except Exception as error:
        reason = f"cannot be fetched from the hub: {' '.join(str(error).split()) or type(error).__name__}"
    raise ModelError(f"model.model_path {hub_id} {reason}")
