"""The base of every configuration section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Threads = Literal["auto"] | Annotated[int, Field(ge=1)]
"""A number of threads, or ``auto``: an equal share of the cores for each trainer process and each engine of the run."""


class Section(BaseModel):
    """A frozen and closed section: an unknown key is an error, and no value changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
