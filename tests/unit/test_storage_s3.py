"""What is particular to S3: listings in pages, headers that every S3-compatible store takes, errors that help."""

from __future__ import annotations

import pytest

from relax_pipeline.errors import ConfigError, PublishError
from relax_pipeline.storage.s3 import S3Store
from relax_pipeline.storage.stores import open_store


def test_listing_goes_over_pages(s3_endpoint: str, bucket: str) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for number in range(1005):
        backend.put_object(bucket, f"models/{number:04d}", b"")
    keys = S3Store(bucket, "models", endpoint_url=s3_endpoint).keys()
    assert (len(keys), keys[0], keys[-1]) == (1005, "0000", "1004")


def test_object_carries_its_digest_and_content_type(s3_endpoint: str, bucket: str) -> None:
    import boto3

    open_store(f"s3://{bucket}/a/b", endpoint_url=s3_endpoint).put_bytes("card.svg", b"<svg/>")
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    head = client.head_object(Bucket=bucket, Key="a/b/card.svg")
    assert head["ContentType"] == "image/svg+xml"
    # printf '<svg/>' | sha256sum
    assert head["Metadata"] == {"sha256": "d4dc56669143034f31aa309635d4113d9ad76a02b1739da22c965ed2049be9e6"}


def test_missing_bucket_says_what_to_do(s3_endpoint: str) -> None:
    with pytest.raises(PublishError, match=r"NoSuchBucket.*create the bucket"):
        open_store("s3://no-such-bucket/x", endpoint_url=s3_endpoint).put_bytes("key", b"")


def test_missing_credentials_say_what_to_do(s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PublishError, match="set AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{bucket}", endpoint_url=s3_endpoint).get_bytes("key")


@pytest.mark.parametrize("uri", ["s3://", "s3:///key"])
def test_uri_without_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="names no object store"):
        open_store(uri)


def test_endpoint_needs_a_scheme() -> None:
    with pytest.raises(ConfigError, match="https://host"):
        open_store("s3://bucket", endpoint_url="localhost:9000")
