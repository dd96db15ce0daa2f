"""What one sync did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SyncReport:
    """Figures of one sync; seconds are of the driver's clock."""

    version: int
    mode: str
    num_bytes: int = 0
    """Sent to each engine; 0 when every engine already held the version."""
    seconds: dict[str, float] = field(default_factory=dict)
    """export, transfer, activate, verify: the last two parts of it side by side, the trainer's and the engine's. pause
    is how long the engines were kept idle for it, in merge mode."""
    probe_difference: float | None = None
    """Mean |logprob| difference between an engine and the trainer, of the worst engine; None: not compared."""
    rounding_share: float | None = None
    """Merge mode: share of changed entries that rounding left as they were."""
    engines: list[str] = field(default_factory=list)
    """Engines that hold and may serve the version."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Engines that failed, and why."""

    def include(self, engine: SyncReport) -> None:
        """Add one engine's part; engines work side by side, so the slowest one counts."""
        self.num_bytes = max(self.num_bytes, engine.num_bytes)
        if engine.probe_difference is not None:
            self.probe_difference = max(self.probe_difference or 0.0, engine.probe_difference)
        for phase, seconds in engine.seconds.items():
            self.seconds[phase] = max(self.seconds.get(phase, 0.0), seconds)

    def metrics(self) -> dict[str, float]:
        """Return the figures to plot."""
        values = {"sync/bytes": float(self.num_bytes), "sync/engines": float(len(self.engines))}
        values |= {f"sync/{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        if self.probe_difference is not None:
            values["sync/probe_difference"] = self.probe_difference
        if self.rounding_share is not None:
            values["sync/rounding_share"] = self.rounding_share
        return values
