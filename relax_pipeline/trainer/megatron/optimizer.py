"""AdamW on float32 masters of what trains, clipped by the norm over all ranks.

Megatron's own optimizers are not used: their state cannot move to another number of expert-parallel ranks, and the
masters must be reachable for exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from relax_pipeline.config import OptimizerConfig
from relax_pipeline.trainer.adamw import make_adamw
from relax_pipeline.trainer.megatron.parallel import Ranks
from relax_pipeline.trainer.megatron.sharding import copies


class MasterOptimizer:
    """Owns the masters and the optimizer's state.

    Attributes:
        parameters: What trains on this rank, in the model's dtype.
        masters: The same in float32, and what the model's are rounded from.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, ranks: Ranks) -> None:
        self.parameters = dict(parameters)
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        self._ranks, self._max_norm = ranks, config.max_grad_norm
        self._share = {name: 1 / copies(p, ranks.groups) for name, p in parameters.items()}
        # A pipeline stage may have nothing to train, which AdamW refuses.
        trained = list(self.masters.values()) or [nn.Parameter(torch.zeros(0, device=ranks.device))]
        self._adamw = make_adamw(trained, config)

    def accumulate(self) -> None:
        """Add the gradients that Megatron has reduced to those of earlier calls."""
        for name, parameter in self.parameters.items():
            gradient = parameter.main_grad  # type: ignore[attr-defined]
            master = self.masters[name]
            master.grad = gradient.float().clone() if master.grad is None else master.grad.add_(gradient)

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def grad_norm(self) -> float:
        """Return the norm over all ranks, each parameter counted once; all ranks together."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for name, master in self.masters.items():
            if master.grad is not None:
                total += self._share[name] * master.grad.double().square().sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    @torch.no_grad()
    def step(self, *, rate: float, grad_norm: float) -> None:
        """Clip, step, round the masters into the model, forget the gradients."""
        scale = min(1.0, self._max_norm / (grad_norm + 1e-6))  # as torch's clip_grad_norm_
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(scale)
        self._adamw.param_groups[0]["lr"] = rate
        self._adamw.step()
        self.clear()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    @contextmanager
    def held_in(self, chunks: Sequence[nn.Module], others: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Let the model hold others in place of its parameters, by the parameters' names, inside this block.

        The parameters are exchanged whole: another dtype under the same parameter would lose Megatron's hooks on it.
        """
        replacements = {parameter: others[name] for name, parameter in self.parameters.items()}
        slots = [
            (module, leaf, parameter)
            for chunk in chunks
            for module in chunk.modules()
            for leaf, parameter in module.named_parameters(recurse=False)
            if parameter in replacements
        ]
        for module, leaf, parameter in slots:
            setattr(module, leaf, replacements[parameter])
        try:
            yield
        finally:
            for module, leaf, parameter in slots:
                setattr(module, leaf, parameter)

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's exp_avg and exp_avg_sq; zeros before the first step."""
        master = self.masters[name]
        state = self._adamw.state[master]
        if not state:
            self.set_moments(name, {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}, updates=0)
        return {key: state[key] for key in ("exp_avg", "exp_avg_sq")}

    def set_moments(self, name: str, moments: Mapping[str, torch.Tensor], *, updates: int) -> None:
        """Continue from these, after that many steps."""
        self._adamw.state[self.masters[name]] |= {"step": torch.tensor(float(updates)), **moments}
