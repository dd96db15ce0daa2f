"""The fsdp trainer's sharded state on disk, through torch.distributed.checkpoint: resharded on load as needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from relax_pipeline.errors import CheckpointError

_UPDATES = "optimizer_updates"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def state_copy(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    *,
    frozen: Mapping[str, nn.Parameter],
    updates: int,
) -> dict[str, torch.Tensor]:
    """Return what this rank has of a checkpoint, parameters and Adam state, in host memory."""
    state = _template(parameters, frozen) | {_UPDATES: torch.tensor(updates)}
    for name, parameter in parameters.items():
        for moment in _MOMENTS:
            if parameter in optimizer.state:
                state[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    copied: dict[str, torch.Tensor] = DefaultStager(_PLAIN).stage(state)  # type: ignore[assignment]
    return copied


def write_state(folder: Path, state: dict[str, torch.Tensor], group: ProcessGroup | None) -> None:
    """Write a checkpoint; every rank of a group that nothing else uses meanwhile writes its own part.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    try:
        with _without_warning_of_one_process():
            state_dict_saver.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (OSError, CheckpointException) as error:  # the latter derives from BaseException
        raise CheckpointError(f"{folder} cannot be written: {_reason(error)}") from error


def load_state(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.AdamW,
    *,
    frozen: Mapping[str, nn.Parameter],
) -> int:
    """Load parameters and Adam state in place, under any number of ranks; return the optimizer steps taken.

    Raises:
        CheckpointError: The folder holds other parameters, other shapes, or cannot be read.
    """
    state = _template(parameters, frozen) | {_UPDATES: torch.tensor(0)}
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        if stored.keys() != state.keys():
            difference = sorted(stored.keys() ^ state.keys())
            raise CheckpointError(
                f"{folder} and this trainer differ in {len(difference)} parameters, e.g. {difference[:3]}"
            )
        with _without_warning_of_one_process():
            state_dict_loader.load(state, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_reason(error)}") from error
    updates = int(state[_UPDATES].item())
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates)),
            **{moment: state[f"{moment}/{name}"] for moment in _MOMENTS},
        }
    return updates


def _reason(error: BaseException) -> str:
    """Return what went wrong, on the first rank where it did, without the traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


@contextmanager
def _without_warning_of_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _template(parameters: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: the parameters themselves, and zero moments laid out like the trained."""
    state = {f"parameter/{name}": parameter.detach() for name, parameter in (*parameters.items(), *frozen.items())}
    for moment in _MOMENTS:
        state |= {f"{moment}/{name}": torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
    return state
