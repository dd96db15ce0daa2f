"""The checkpoint a session is writing: begun, perhaps behind the next step, and then made one that counts."""

from __future__ import annotations

import logging

from relax_pipeline.checkpoint.manifest import Identity, Manifest
from relax_pipeline.checkpoint.mirror import Mirror
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import RunConfig
from relax_pipeline.errors import RelaxError
from relax_pipeline.trainer.base import Trainer
from relax_pipeline.types import DataPosition

logger = logging.getLogger(__name__)


class Saves:
    """Writes one checkpoint at a time, sends it to the store, and prunes old ones."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        checkpoints: CheckpointStore,
        trainer: Trainer,
        mirror: Mirror | None,
    ) -> None:
        self._config, self._identity = config, identity
        self._checkpoints, self._trainer, self._mirror = checkpoints, trainer, mirror
        self._begun: Manifest | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is begun that does not count yet."""
        return self._begun is not None

    def begin(self, step: int, position: DataPosition, run_id: str) -> None:
        """Have the trainer copy what it holds and begin to write it, once the checkpoint before counts.

        Args:
            step: Steps done.
            position: Of the first prompt to draw after them.
            run_id: See `Manifest`.

        Raises:
            CheckpointError: It cannot be written; earlier checkpoints are as they were.
        """
        self.commit()
        manifest = Manifest(
            run_name=self._config.run_name,
            step=step,
            policy_version=self._trainer.policy_version(),
            identity=self._identity,
            base_digest=self._identity.base_digest,
            epoch=position.epoch,
            offset=position.offset,
            run_id=run_id,
            layout=self._config.trainer.model_dump(),
        )
        self._checkpoints.begin(step, self._trainer.begin_save)
        self._begun = manifest

    def commit(self) -> CheckpointRef | None:
        """Wait until the checkpoint that was begun is written, and make it count; None if there is none.

        Raises:
            CheckpointError: It was not written; earlier checkpoints are as they were.
        """
        manifest, self._begun = self._begun, None
        if manifest is None:
            return None
        ref = self._checkpoints.commit(manifest, self._trainer.finish_save)
        if self._mirror:
            self._mirror.send(ref)
        kept = self._config.checkpoint
        self._checkpoints.prune(keep_last=kept.keep_last, keep_every=kept.keep_every)
        return ref

    def wait_until_sent(self) -> None:
        """Wait until the last checkpoint that counts is in checkpoint.store, if there is one.

        Raises:
            PublishError: It is on this machine only.
        """
        if self._mirror:
            self._mirror.finish()

    def close(self) -> None:
        """Commit what was begun, if the trainer still answers."""
        step = self._begun.step if self._begun else 0
        try:
            self.commit()
        except RelaxError as error:
            logger.warning("the save of step %d was lost: %s", step, error)
