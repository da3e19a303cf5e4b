"""Converts a GGUF file to a Hugging Face folder with float32 weights; used by scripts/get-smollm2.

python -m trinity_mq.models.gguf_folder FILE.gguf FOLDER

Needs the packages ``gguf`` and ``accelerate``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from trinity_mq.models.errors import ModelError
from trinity_mq.runtime.process import apply_umask

FLOAT32_BYTES = 4
MEMORY_FACTOR = 2.5
"""Peak memory divided by the size of the float32 weights; the measured value is 2.2."""
SPARE_BYTES = 100 * 2**20
PRE_TOKENIZER = "tokenizer.ggml.pre"
LONGEST = "llama.context_length"


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in the file ``gguf`` as the Hugging Face folder ``folder``. The folder appears complete or not at
    all.

    Raises:
        ModelError: ``gguf`` cannot be read, memory or disk space is too small, or ``folder`` cannot be written; the
            message is one line with the reason.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fields = _checked(gguf, folder.parent)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as part:
            _write(gguf, fields, Path(part) / "model")
            (Path(part) / "model").replace(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error


def _checked(gguf: Path, where: Path) -> dict[str, Any]:
    """Return the metadata for the tokenizer, ``PRE_TOKENIZER`` and ``LONGEST``, as far as the file has them, after a
    check that disk and memory suffice.

    Raises:
        ModelError: The file cannot be read, or disk or memory is too small.
    """
    import psutil
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except Exception as error:  # for a file that is cut off or damaged, GGUFReader raises errors of many classes
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{gguf} cannot be read: {reason}; give the path of a whole GGUF file") from error
    size = FLOAT32_BYTES * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free, memory = shutil.disk_usage(where).free, psutil.virtual_memory().available
    if free < size + SPARE_BYTES:
        raise ModelError(
            f"{where} has {_gigabytes(free)} free, and the model needs {_gigabytes(size + SPARE_BYTES)}: make room, or "
            "name a folder on another disk"
        )
    if memory < size * MEMORY_FACTOR:
        raise ModelError(
            f"{_gigabytes(memory)} of memory is available, and the conversion needs "
            f"{_gigabytes(size * MEMORY_FACTOR)}: end other programs, or do it on another machine and copy the folder"
        )
    return {name: field.contents() for name in (PRE_TOKENIZER, LONGEST) if (field := reader.get_field(name))}


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _write(gguf: Path, fields: dict[str, Any], folder: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # progress bars fill a page of the log within seconds
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if fields.get(PRE_TOKENIZER) == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = _smollm_pre_tokenizer()
    tokenizer.model_max_length = fields.get(LONGEST, tokenizer.model_max_length)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses quantized models, and the weights are not quantized any more
    del model.config.quantization_config
    model.hf_quantizer = None
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special_ids)
    model.save_pretrained(folder)
    apply_umask(folder)


def _smollm_pre_tokenizer() -> Any:
    """Return SmolLM's pre-tokenizer, which splits every digit off before byte pairs are merged.

    The pre-tokenizer that transformers reads from a GGUF file does not do that, and it splits spaces before a digit
    differently.
    """
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


if __name__ == "__main__":
    try:
        convert(*map(Path, sys.argv[1:]))
    except ModelError as error:
        sys.exit(f"error: {error}")
