"""The checkpoint a session is writing: begun, perhaps behind the next step, and then made one that counts."""

from __future__ import annotations

import logging

from relax_pipeline.checkpoint.manifest import Manifest
from relax_pipeline.checkpoint.mirror import Mirror
from relax_pipeline.checkpoint.store import CheckpointRef, CheckpointStore
from relax_pipeline.config import CheckpointConfig
from relax_pipeline.errors import RelaxError
from relax_pipeline.trainer.base import Trainer

logger = logging.getLogger(__name__)


class Saves:
    """Writes one checkpoint at a time, sends it to the store, and prunes old ones."""

    def __init__(
        self, checkpoints: CheckpointStore, trainer: Trainer, mirror: Mirror | None, config: CheckpointConfig
    ) -> None:
        self._checkpoints, self._trainer, self._mirror, self._config = checkpoints, trainer, mirror, config
        self._begun: Manifest | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is begun that does not count yet."""
        return self._begun is not None

    def begin(self, manifest: Manifest) -> None:
        """Have the trainer copy what it holds and begin to write it, once the checkpoint before counts.

        Raises:
            CheckpointError: It cannot be written; earlier checkpoints are as they were.
        """
        self.commit()
        self._checkpoints.begin(manifest.step, self._trainer.begin_save)
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
        self._checkpoints.prune(keep_last=self._config.keep_last, keep_every=self._config.keep_every)
        return ref

    def close(self) -> None:
        """Commit what was begun, if the trainer still answers."""
        step = self._begun.step if self._begun else 0
        try:
            self.commit()
        except RelaxError as error:
            logger.warning("the save of step %d was lost: %s", step, error)
