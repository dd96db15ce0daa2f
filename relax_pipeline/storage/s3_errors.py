"""What an S3 failure means: will it pass, do credentials need a fresh look, or what should the user change."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
)
from botocore.parsers import ResponseParserError

S3_ERRORS: tuple[type[Exception], ...] = (BotoCoreError, ClientError, ResponseParserError)
"""Everything a request can fail with."""

_ON_THE_WAY = (HTTPClientError, IncompleteReadError, MetadataRetrievalError, ResponseParserError)
_TRANSIENT_CODES = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}
# "400" is all that a HEAD request, whose answer has no body, says of an expired token.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "400"}
_REMEDIES = {
    "AccessDenied": "allow these credentials to read, write and list there",
    "403": "allow these credentials to read, write and list there",
    "InvalidAccessKeyId": "check the credentials, and that endpoint_url is the store they belong to",
    "NoSuchBucket": "create the bucket, or correct the destination",
    "NotImplemented": "the store lacks conditional writes (If-None-Match, If-Match), which publishing relies on",
    "SignatureDoesNotMatch": "check the secret key, the region and the clock",
}


def error_code(error: Exception) -> str:
    """Return S3's code for an error, or the HTTP status where the answer had no body; '' if S3 did not answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def has_expired(error: Exception) -> bool:
    """Whether credentials must be read anew before the next attempt."""
    return isinstance(error, CredentialRetrievalError) or error_code(error) in _EXPIRED_CODES


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, _ON_THE_WAY) or has_expired(error) or error_code(error) in _TRANSIENT_CODES:
        return True
    status = error.response["ResponseMetadata"]["HTTPStatusCode"] if isinstance(error, ClientError) else 0
    return status == 429 or (status >= 500 and status != 501)


def remedy(error: Exception) -> str:
    """Return what the user can do about an error."""
    if isinstance(error, NoCredentialsError):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or an instance role"
    if has_expired(error):
        return "renew the credentials; they are read again at each attempt"
    if is_transient(error):
        return "publish again when the store can be reached: what has arrived is kept"
    return _REMEDIES.get(error_code(error), "see the cause")
