"""One place in an S3 bucket and the patience to reach it: each request is repeated until it succeeds or cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from relax_pipeline.errors import PublishError
from relax_pipeline.storage.retry import retry
from relax_pipeline.storage.s3_errors import S3_ERRORS, error_code, has_expired, is_transient, remedy

_T = TypeVar("_T")


class Bucket:
    """Requests to a bucket, for keys below a prefix."""

    def __init__(self, name: str, prefix: str, *, connect: Callable[[], Any], deadline_s: float) -> None:
        self.name = name
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.deadline_s = deadline_s
        self._connect = connect
        self._client: Any = None
        self._connecting = threading.Lock()

    @property
    def uri(self) -> str:
        """Bucket and prefix, without a slash at the end."""
        return f"s3://{self.name}/{self.prefix}".rstrip("/")

    def where(self, key: str) -> dict[str, Any]:
        """The arguments that name one object."""
        return {"Bucket": self.name, "Key": self.prefix + key}

    def call(self, key: str, request: Callable[[Any], _T], *, deadline_s: float | None = None) -> _T:
        """Return what `request(client)` returns, repeating it while it fails for reasons that may pass.

        Raises:
            PublishError: It failed for good, or for `deadline_s` seconds; the last failure is the cause.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        try:
            return retry(lambda: self._attempt(request), errors=S3_ERRORS, is_transient=is_transient, deadline_s=limit)
        except S3_ERRORS as error:
            raise PublishError(f"{self.uri}/{key}: {error}; {remedy(error)}") from error

    def call_unless(
        self, codes: frozenset[str], key: str, request: Callable[[Any], _T], *, deadline_s: float | None = None
    ) -> _T | None:
        """As `call`; None where the store answers with one of these error codes."""

        def tolerant(client: Any) -> _T | None:
            try:
                return request(client)
            except S3_ERRORS as error:
                if error_code(error) in codes:
                    return None
                raise

        return self.call(key, tolerant, deadline_s=deadline_s)

    def entries(self, operation: str, field: str, prefix: str) -> list[dict[str, Any]]:
        """Return all entries of a paged listing below a prefix; a failure between pages starts it over."""

        def collect(client: Any) -> list[dict[str, Any]]:
            pages = client.get_paginator(operation).paginate(Bucket=self.name, Prefix=self.prefix + prefix)
            return [entry for page in pages for entry in page.get(field, [])]

        return self.call(prefix, collect)

    def relative(self, key: str) -> str:
        """Return a bucket's key as one below the prefix."""
        return key.removeprefix(self.prefix)

    def _attempt(self, request: Callable[[Any], _T]) -> _T:
        with self._connecting:
            self._client = client = self._client or self._connect()
        try:
            return request(client)
        except S3_ERRORS as error:
            with self._connecting:
                # A new client looks credentials up anew; another thread may have got one already.
                if has_expired(error) and self._client is client:
                    self._client = None
            raise
