"""One trainer per run across hosts: an object in the checkpoint store that names the attempt which may write there.

No clock is compared: an owner renews its object, and another attempt watches for as long as an owner may stay silent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from relax_pipeline.errors import CheckpointError, RunLockedError
from relax_pipeline.storage.base import ObjectStore

RENEW_SECONDS = 15.0
SILENCE_SECONDS = 60.0
"""An owner that renews nothing for so long is dead, or cut off and stopped at its next save."""


class Owner(BaseModel):
    """Who trains a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: str
    host: str
    pid: int
    run_folder: str
    renewals: int = 0


class Ownership:
    """This process's claim on a run in a store."""

    def __init__(
        self, store: ObjectStore, run_name: str, run_folder: Path, *, silence: float = SILENCE_SECONDS
    ) -> None:
        self._store, self._key, self._silence = store, f"{run_name}/owner.json", silence
        self._me = Owner(
            attempt=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), run_folder=str(run_folder)
        )
        self._lock = threading.Lock()
        self._lost: str | None = None

    def acquire(self) -> None:
        """Become the owner; waits while another one may be alive.

        Raises:
            RunLockedError: Another attempt is.
        """
        while not self._store.put_bytes(self._key, self._content(), if_none_match=True):
            info, owner = self._store.head(self._key), self._read()
            if info is None or owner is None:
                continue  # released between the two calls
            if owner.attempt == self._me.attempt:
                return  # our own write arrived, and its answer was lost
            # The lock of the run's folder on this host, which this process holds, says that the other is gone.
            here = (owner.host, owner.run_folder) == (self._me.host, self._me.run_folder)
            if not here and self._is_alive(info.version):
                raise RunLockedError(f"{self._where()} is being trained by {_describe(owner)}; wait for it, or stop it")
            if self._store.put_bytes(self._key, self._content(), if_match=info.version):
                return

    def renew(self) -> None:
        """Show that this attempt is alive.

        Raises:
            RunLockedError: Another attempt has taken the run.
        """
        with self._lock:
            self.check()
            self._me = self._me.model_copy(update={"renewals": self._me.renewals + 1})
            written = False
            while not written:
                info, owner = self._store.head(self._key), self._read()
                if info is None or owner is None or owner.attempt != self._me.attempt:
                    by = f"is now owned by {_describe(owner)}" if owner else "owner.json was deleted"
                    self._lost = f"{self._where()} was taken from this attempt: {by}"
                    self.check()
                # Refused where somebody was faster, or our own write arrived and its answer was lost: look again.
                written = owner == self._me or self._store.put_bytes(
                    self._key, self._content(), if_match=info.version if info else None
                )

    def check(self) -> None:
        """Asks nobody.

        Raises:
            RunLockedError: An earlier `renew` has found the run taken.
        """
        if self._lost:
            raise RunLockedError(f"{self._lost}; this attempt stops, and what it had not saved is done again there")

    def release(self) -> None:
        """Let go of the run, if it is still this attempt's."""
        with self._lock:
            owner = self._read()
            if owner and owner.attempt == self._me.attempt:
                self._store.delete(self._key)

    def _is_alive(self, version: str) -> bool:
        """Watch whether the owner's object changes while an owner may stay silent."""
        deadline = time.monotonic() + self._silence
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._silence / 10))
            info = self._store.head(self._key)
            if info is None:
                return False
            if info.version != version:
                return True
        return False

    def _read(self) -> Owner | None:
        data = self._store.get_bytes(self._key)
        try:
            return Owner.model_validate_json(data) if data is not None else None
        except ValidationError as error:
            raise CheckpointError(f"{self._store.uri}/{self._key} is no owner record; delete it: {error}") from error

    def _content(self) -> bytes:
        return self._me.model_dump_json().encode()

    def _where(self) -> str:
        return f"{self._store.uri}/{self._key.partition('/')[0]}"


def _describe(owner: Owner) -> str:
    return f"process {owner.pid} on {owner.host} in {owner.run_folder}"
