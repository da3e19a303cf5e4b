"""The base of every configuration section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, closed section: an unknown key is an error, and nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
