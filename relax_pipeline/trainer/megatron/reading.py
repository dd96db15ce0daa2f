"""How Megatron-Bridge gets a checkpoint's tensors: the headers are read once.

It opens a file anew for each tensor, which parses all names in it each time: with thousands of experts, minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from relax_pipeline.safetensors_io.header import folder_tensors
from relax_pipeline.safetensors_io.read import read_tensor


def load_tensors(self: Any, keys_to_load: Iterable[str]) -> dict[str, torch.Tensor]:
    """Stand for `SafeTensorsStateSource.load_tensors`.

    Raises:
        KeyError: The checkpoint has no tensor of that name.
    """
    if "places" not in vars(self):
        self.places = {info.name: info for info in folder_tensors(self.path)}
    return {key: read_tensor(self.places[key]) for key in keys_to_load}
