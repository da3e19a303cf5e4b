"""Texts of token ids, decoded without a model library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config import ModelConfig
from trinity_mq.models.model_folder import cached_folder

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Decodes token ids to texts, each token by itself.

    Args:
        folder: A Hugging Face folder. None, or a folder without ``tokenizer.json``: all texts are None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._tokenizer: Any = None
        self.problem: str | None = None
        """The reason why no texts are available. None: texts are available."""
        if folder is None:
            self.problem = "no tokenizer is known"
            return
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the Rust library raises plain Exception, also for a missing file
            self.problem = f"{folder / TOKENIZER_FILE} cannot be loaded: {error}"

    def of(self, ids: Iterable[int]) -> list[str | None]:
        """Return the text of each token. None: the id is not in the vocabulary, or no tokenizer is loaded."""
        return [None if self._tokenizer is None else self._text(token) for token in ids]

    def _text(self, token: int) -> str | None:
        if token < 0 or self._tokenizer.id_to_token(token) is None:
            return None
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        # the token is part of a character: show the vocabulary's spelling of its bytes instead
        return text if "\ufffd" not in text else self._tokenizer.id_to_token(token)


def tokenizer_folder(model: ModelConfig, run_folder: Path) -> Path | None:
    """Return the folder with the tokenizer of a run's model, or None if it is not on this machine. Nothing is
    downloaded.
    """
    if model.tiny is not None:
        folder = run_folder / "model"
    else:
        folder = Path(str(model.model_path)).expanduser()
        if not folder.is_dir():
            return cached_folder(str(model.model_path), TOKENIZER_FILE)
    return folder if (folder / TOKENIZER_FILE).is_file() else None


def spelled(ids: Sequence[int], texts: Sequence[str | None]) -> str:
    """Return tokens in one line: ``13'+' 5'3'``, or ``13 5`` without texts."""
    return " ".join(str(token) if text is None else f"{token}{text!r}" for token, text in zip(ids, texts, strict=True))
