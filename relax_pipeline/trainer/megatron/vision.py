"""Models that see, trained on text: the language part is built alone, the vision part stays in the model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from relax_pipeline.lora.scope import in_vision_region
from relax_pipeline.safetensors_io.header import TensorInfo, folder_tensors


class LanguagePart(MegatronModule):  # type: ignore[misc]
    """A language model under the name it has in Megatron-Bridge's model of both parts, by which weights are mapped."""

    def __init__(self, language_model: MegatronModule) -> None:
        super().__init__(language_model.config)
        self.language_model = language_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the language model returns."""
        return self.language_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the language model's attributes: pipeline schedules ask for several."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("language_model"), name)


def provide_language_part(provider: Any, *args: Any, **kwargs: Any) -> LanguagePart:
    """Build the language part; stands for the `provide` of a provider of both parts."""
    return LanguagePart(provider.provide_language_model(*args, **kwargs))


def language_settings(provider: Any) -> dict[str, Any]:
    """Return what makes a provider's language model one for text alone; nothing where it is one.

    A text token has the same place in time, height and width. So the rotary embedding of all three is the plain one.
    """
    if not sees(provider):
        return {}
    return {"position_embedding_type": "rope", "scatter_embedding_sequence_parallel": True}


def sees(provider: Any) -> bool:
    """Whether a provider's model has a vision part."""
    return hasattr(provider, "vision_config")


def vision_tensors(folder: Path) -> tuple[TensorInfo, ...]:
    """Return where the weights of the vision part lie."""
    return tuple(info for info in folder_tensors(folder) if in_vision_region(info.name))
