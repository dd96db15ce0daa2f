"""Which policy versions a server holds: adapters side by side, or one whole model at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from relax_pipeline.errors import EngineError, UnknownVersionError
from relax_pipeline.lora.fingerprint import combine_digests
from relax_pipeline.rollout.base import adapter_name
from relax_pipeline.types import Ack


class Versions:
    """What was sent to a server, what it may be asked for, and under which name."""

    def __init__(self, engine_id: str, incarnation: str, tensor_names: Collection[str]) -> None:
        """`tensor_names` are those of a whole model."""
        self._id, self._incarnation, self._tensor_names = engine_id, incarnation, set(tensor_names)
        self._staged: dict[int, Ack] = {}
        self._active: dict[int, Ack] = {}
        self._weights_version: int | None = None
        self._digests: dict[str, str] = {}

    def refuse_known(self, version: int) -> None:
        """Raise EngineError for a version whose adapter is here already."""
        if version in self._staged or version in self._active:
            raise EngineError(f"engine {self._id} already holds version {version}; versions never change")

    def stage(self, version: int, *, digest: str, modules: tuple[str, ...]) -> None:
        """Note an adapter that the server was given."""
        self._staged[version] = Ack(self._id, self._incarnation, version, digest, modules)

    def begin_weights(self, version: int) -> None:
        """Note that weights are being replaced: until `activate`, nothing is served."""
        if version != self._weights_version:
            self._digests.clear()
        self._weights_version = version
        self._active.clear()

    def add_weights(self, digests: Mapping[str, str]) -> None:
        """Note weights that the server was given."""
        self._digests |= digests

    def activate(self, version: int, *, listed: Collection[str]) -> Ack:
        """Let a version be asked for.

        Args:
            version: Staged, or the one whose weights were given.
            listed: Names of the adapters that the server says it holds.

        Raises:
            UnknownVersionError: It was never sent.
            EngineError: The server does not list it, or parts of the model were never sent.
        """
        if version in self._active:
            return self._active[version]
        if version == self._weights_version:
            missing = sorted(self._tensor_names - set(self._digests))
            if missing:
                raise EngineError(f"engine {self._id}, version {version}: never received {missing[:4]}")
            names = tuple(sorted(self._digests))
            self._active[version] = Ack(self._id, self._incarnation, version, combine_digests(self._digests), names)
        elif version in self._staged:
            if adapter_name(version) not in listed:
                raise EngineError(f"engine {self._id}: SGLang does not list {adapter_name(version)}, which it was sent")
            self._active[version] = self._staged.pop(version)
        else:
            raise UnknownVersionError(f"engine {self._id} was never sent version {version}")
        return self._active[version]

    def drop(self, version: int) -> bool:
        """Forget a version; return whether the server holds an adapter of it."""
        if version == self._weights_version:
            return False
        staged, active = self._staged.pop(version, None), self._active.pop(version, None)
        return (staged or active) is not None

    def adapter(self, version: int | None) -> str | None:
        """Return the adapter's name for requests to a version; None for the model's own weights.

        Raises:
            UnknownVersionError: The version is not active here.
        """
        if version is None and self._weights_version is None:
            return None
        if version is None or version not in self._active:
            raise UnknownVersionError(f"engine {self._id} holds policy versions {sorted(self._active)}, not {version}")
        return None if version == self._weights_version else adapter_name(version)
