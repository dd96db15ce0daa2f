"""What every section of the configuration shares."""

from __future__ import annotations

import warnings

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


def advise(message: str) -> None:
    """Warn of a setting that works and is seldom meant."""
    warnings.warn(message, UserWarning, stacklevel=3)
