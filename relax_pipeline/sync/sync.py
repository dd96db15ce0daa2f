"""Keep every engine on the trainer's policy, and out of service until it has shown that it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from relax_pipeline.config import SyncConfig
from relax_pipeline.errors import EngineError, SyncError
from relax_pipeline.rollout.base import EngineInfo
from relax_pipeline.rollout.pool import EnginePool, Slot
from relax_pipeline.sync.contract import check_contract, table
from relax_pipeline.sync.probe import Probe
from relax_pipeline.sync.report import SyncReport
from relax_pipeline.sync.verify import check_ack, check_base
from relax_pipeline.sync.weights import Shipment, export_adapter, export_merged
from relax_pipeline.timing import timed
from relax_pipeline.trainer.base import Trainer

_log = logging.getLogger(__name__)


class WeightSync:
    """Sends versions, checks them, remembers which engine incarnation acknowledged which, and retires old ones."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        pool: EnginePool,
        config: SyncConfig,
        tolerance: float,
        probe: Sequence[Sequence[int]],
        keep_versions: int,
    ) -> None:
        self._trainer, self._pool, self._config = trainer, pool, config
        self._keep_versions = keep_versions
        self._probe = Probe(trainer, probe, tolerance=tolerance, timeout=config.timeout_seconds)
        self._base_digest = trainer.info().base_tensors_digest
        self._acknowledged: dict[str, tuple[str, dict[int, str]]] = {}
        """By engine id: incarnation, and the digest of each version that one acknowledged."""
        self._shipments: list[Shipment] = []
        self._num_syncs = 0
        self._agreed = False
        # The rollout thread heals while the trainer's thread syncs; engines are replaced by one at a time.
        self._lock = threading.RLock()

    def sync(self) -> SyncReport:
        """Bring all engines to the trainer's policy version; a version an engine has acknowledged is not sent again.

        Raises:
            SyncError: No engine holds the version afterwards; lists why. Before the first: engines cannot host what
                is trained; lists what.
        """
        report = SyncReport(self._trainer.policy_version(), self._config.mode)
        with self._lock:
            with timed(report.seconds, "export"):
                self._export(report.version)
            report.rounding_share = self._shipments[-1].rounding_share
            self._expect(report.version)
            try:
                self._pool.replace_lost()
                self._agree()
                with self._paused(report) if self._config.mode == "merge" else nullcontext():
                    self._bring_up(report)
                    self._pool.serving_version = report.version
            finally:
                self._probe.settle()
            self._retire()
        return report

    def heal(self) -> None:
        """Replace engines that failed and bring them to every version still in use.

        Raises:
            SyncError: No engine could be brought back.
        """
        with self._lock:
            self._pool.replace_lost()
            self._bring_up(SyncReport(self._pool.serving_version, self._config.mode))

    def check_bases(self) -> None:
        """Compare the base every engine loaded with the trainer's.

        Raises:
            SyncError: An engine serves another base than the one trained on.
        """
        for slot in self._pool.running():
            check_base(slot.info, self._base_digest)

    def _export(self, version: int) -> None:
        if self._shipments and self._shipments[-1].info.version == version:
            return
        if self._config.mode == "adapter":
            self._shipments.append(export_adapter(self._trainer))
        else:
            for shipment in self._shipments:
                self._probe.forget(shipment.info.version)
            self._shipments = [export_merged(self._trainer, buffer_bytes=self._config.buffer_bytes)]

    def _agree(self) -> None:
        """Before the first adapter is sent: compare what is trained and exported with what engines can host."""
        if self._config.mode == "adapter" and not self._agreed:
            engines = [slot.info for slot in self._pool.running()]
            rows = check_contract(self._trainer.info().modules, self._shipments[-1].info.modules, engines)
            _log.info("adapters go to %d engines:\n%s", len(engines), table(rows))
            self._agreed = True

    def _expect(self, version: int) -> None:
        """Have the trainer compute the probe of a new version, where this sync is one that compares it."""
        due = self._config.verify and self._num_syncs % self._config.verify_every == 0
        self._num_syncs += 1
        if due and not self._probe.expects(version):
            self._probe.expect(version)

    @contextmanager
    def _paused(self, report: SyncReport) -> Iterator[None]:
        """Keep the engines idle inside this block."""
        with self._pool.drained(), timed(report.seconds, "pause"):
            yield

    def _bring_up(self, report: SyncReport) -> None:
        """Bring all running engines to the versions in use; replace them once if none of them can be."""
        self._bring_up_running(report)
        if not self._pool.ready():  # they died unnoticed since they were last asked for something
            self._pool.replace_lost()
            self._bring_up_running(report)
        report.engines = [slot.info.engine_id for slot in self._pool.ready()]
        report.quarantined = {str(s.index): s.failure for s in self._pool.slots if s.failure is not None}
        if not report.engines:
            reasons = "; ".join(
                f"engine {s.index} ({s.restarts_left} restarts left): {s.failure}" for s in self._pool.slots
            )
            raise SyncError(f"no engine holds policy version {report.version}: {reasons}")

    def _bring_up_running(self, report: SyncReport) -> None:
        """Send, activate and verify all versions in use on all running engines at once; quarantine those that fail."""
        with ThreadPoolExecutor(len(self._pool.slots)) as threads:
            for part in threads.map(self._bring_up_engine, self._pool.running()):
                report.include(part)

    def _bring_up_engine(self, slot: Slot) -> SyncReport:
        report = SyncReport(self._pool.serving_version, self._config.mode)
        held = self._held(slot.info)
        try:
            check_base(slot.info, self._base_digest)
            if self._config.verify:
                self._probe.meet(slot.engine, slot.info)
            for shipment in self._shipments:
                if held.get(shipment.info.version) == shipment.info.digest:
                    continue
                with timed(report.seconds, "transfer"):
                    shipment.send(slot.engine)
                report.num_bytes += shipment.info.num_bytes
                with timed(report.seconds, "activate"):
                    ack = slot.engine.activate(shipment.info.version)
                if self._config.verify:
                    check_ack(ack, shipment.info)
                if self._probe.expects(shipment.info.version):
                    with timed(report.seconds, "verify"):
                        difference = self._probe.check(slot.engine, slot.info, shipment.info.version)
                    report.probe_difference = max(report.probe_difference or 0.0, difference)
                held[shipment.info.version] = ack.digest
            self._pool.admit(slot)
        except (EngineError, SyncError) as error:
            self._pool.quarantine(slot, str(error))
        return report

    def _held(self, engine: EngineInfo) -> dict[int, str]:
        """Return the digests that this incarnation of an engine has acknowledged, by version."""
        met, held = self._acknowledged.get(engine.engine_id, ("", {}))
        if met != engine.incarnation:
            held = {}
            self._acknowledged[engine.engine_id] = engine.incarnation, held
        return held

    def _retire(self) -> None:
        """Forget versions no rollout can still ask for; merge mode holds one version anyway."""
        while len(self._shipments) > self._keep_versions:
            old = self._shipments.pop(0).info.version
            self._probe.forget(old)
            for slot in self._pool.ready():
                try:
                    slot.engine.retire(old)
                except EngineError as error:
                    self._pool.quarantine(slot, str(error))
