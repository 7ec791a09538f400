"""S3 alone, against Ceph: what the store refuses, credentials that are replaced, clocks that differ."""

from __future__ import annotations

import datetime
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.auth
import pytest

from fs.tiers import s3client
from fs.tiers.opening import open_tier
from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import TierError, TierObjectMissing, TierRefused
from tests.tiers.lib import MIB, listed, random_bytes, read, s3_options, s3_tier

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("credentials")]


def calls(tier: S3Tier) -> list[Any]:
    """One call of each kind."""
    return [
        tier.check,
        lambda: tier.put("a/file", b"x", {}),
        lambda: tier.head("a/file"),
        lambda: tier.read("a/file", 10),
        lambda: tier.read_into("a/file", 0, memoryview(bytearray(1)), None),
        lambda: tier.list("a/"),
        lambda: tier.copy("a/file", "b", {}, None),
        lambda: tier.delete("a/file"),
        lambda: tier.start("a/file", {}),
        lambda: list(tier.uploads()),
    ]


def test_a_bucket_that_is_not_there_is_never_an_object_that_is_missing(rgw: Any) -> None:
    tier = s3_tier(rgw, bucket="no-such-bucket")
    for call in calls(tier):
        with pytest.raises(TierRefused, match=r"s3://no-such-bucket/ckpt.*NoSuchBucket.*create"):
            call()


def test_wrong_credentials_are_refused_and_not_shown(
    rgw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    tier = s3_tier(rgw)
    for call in calls(tier):
        with pytest.raises(TierRefused, match=r"SignatureDoesNotMatch.*credentials") as caught:
            call()
        assert "wrong-and-secret" not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    for call in calls(s3_tier(rgw)):
        with pytest.raises(TierRefused, match=r"InvalidAccessKeyId.*credentials"):
            call()


def test_no_credentials_says_where_to_put_them(rgw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(TierRefused, match=r"~/\.aws/credentials"):
        s3_tier(rgw).check()


def test_credentials_that_are_replaced_are_found(
    rgw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"

    def write(secret: str) -> None:
        file.write_text(
            f"[training]\naws_access_key_id={rgw.access_key}\naws_secret_access_key={secret}\n"
        )

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.0)
    write(rgw.secret_key)
    tier = S3Tier(rgw.new_bucket(), "", s3_options(rgw, profile="training"))
    tier.put("file", b"x", {})
    write("of-somebody-else")
    tier.put("file", b"y", {})  # in use until it is refused
    tier = S3Tier(rgw.new_bucket(), "", s3_options(rgw, profile="training"))
    with pytest.raises(TierRefused):
        tier.put("file", b"z", {})
    write(rgw.secret_key)
    with pytest.raises(TierRefused):
        tier.put("file", b"z", {})
    tier.put("file", b"z", {})
    file.write_text("[training]\n")
    assert read(tier, "file") == b"z"


def test_many_calls_that_are_refused_look_once_for_credentials(
    rgw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.2)
    tier = s3_tier(rgw)
    made = []
    make = s3client.S3Client._make
    monkeypatch.setattr(s3client.S3Client, "_make", lambda self: (made.append(1), make(self))[1])
    time.sleep(0.25)

    def refused(_: int) -> None:
        with pytest.raises(TierRefused):
            tier.head("file")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(refused, range(8)))
    assert len(made) == 1


@pytest.mark.parametrize("off_s", [3600, -5400])
def test_a_clock_that_is_wrong(
    rgw: Any, monkeypatch: pytest.MonkeyPatch, off_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier = s3_tier(rgw)
    tier.put("before", b"x", {})

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        def time(self) -> float:
            return time.time() + off_s

    monkeypatch.setattr(s3client, "time", Clock())
    monkeypatch.setattr(
        botocore.auth,
        "get_current_datetime",
        lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=off_s),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(TierError, match="clock") as caught:
        tier.put("file", b"x", {})
    assert type(caught.value) is TierError
    told = re.search(r"clock is ([+-]\d+) s off", caplog.text)
    assert told and abs(int(told[1]) - off_s) < 60
    tier.put("file", random_bytes(MIB), {"ckptfs-a": "b"})
    assert tier.head("file").meta == {"ckptfs-a": "b"}
    assert listed(tier)[0] == ["before", "file"]
    monkeypatch.undo()  # somebody sets the clock: refused once, and right again
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.secret_key)
    with pytest.raises(TierError):
        tier.head("file")
    assert tier.head("file").size == MIB


def test_the_prefix_is_a_directory_not_the_beginning_of_a_name(rgw: Any) -> None:
    bucket = rgw.new_bucket()
    tiers = {
        prefix: s3_tier(rgw, prefix, bucket) for prefix in ("", "ckpt", "ckpt/", "ckpt2", "a b/c")
    }
    assert tiers["ckpt"].url("x") == tiers["ckpt/"].url("x") == f"s3://{bucket}/ckpt/x"
    for prefix in ("ckpt", "ckpt2", "a b/c"):
        tiers[prefix].put("file", prefix.encode(), {})
        tiers[prefix].start("upload", {})
        assert listed(tiers[prefix], deep=True) == (["file"], [])
        assert [found.key for found in tiers[prefix].uploads()] == ["upload"]
    assert listed(tiers[""]) == ([], ["a b/", "ckpt/", "ckpt2/"])
    assert len(list(tiers[""].uploads())) == 3
    tiers[""].put("ckpt/", b"", {})  # as consoles make "folders"
    assert listed(tiers["ckpt"]) == (["file"], [])
    tiers["ckpt"].delete("file")
    with pytest.raises(TierObjectMissing):
        tiers["ckpt"].head("file")
    assert read(tiers["ckpt2"], "file") == b"ckpt2"


def test_a_copy_in_parts_that_fails_leaves_no_upload(
    rgw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = s3_tier(rgw)
    tier.limits = tier.limits._replace(max_copy_bytes=MIB)
    tier.copy_part_bytes = 5 * MIB
    etag = tier.put("file", random_bytes(12 * MIB), {})
    call = s3client.S3Client.call

    def failing(self: Any, what: str, operation: str, key: str, **parameters: Any) -> Any:
        if operation == "upload_part_copy" and parameters["PartNumber"] == 2:
            raise TierError("injected")
        return call(self, what, operation, key, **parameters)

    monkeypatch.setattr(s3client.S3Client, "call", failing)
    with pytest.raises(TierError, match="injected"):
        tier.copy("file", "copy", {}, etag)
    assert list(tier.uploads()) == []
    with pytest.raises(TierObjectMissing):
        tier.head("copy")


def test_checksums_sent_and_checked_where_the_store_can(rgw: Any) -> None:
    options = s3_options(
        rgw,
        request_checksum_calculation="when_supported",
        response_checksum_validation="when_supported",
    )
    tier = open_tier(f"s3://{rgw.new_bucket()}/a/b", options)
    data = random_bytes(5 * MIB + 3)
    tier.put("file", data, {})
    assert read(tier, "file") == data
    upload_id = tier.start("parts", {})
    parts = [(n, tier.put_part("parts", upload_id, n, data)) for n in (1, 2)]
    tier.complete("parts", upload_id, parts)
    assert read(tier, "parts") == data * 2


def test_nobody_listens(rgw: Any) -> None:
    tier = S3Tier("bucket", "", S3Options(endpoint_url="http://127.0.0.1:1", connect_timeout_s=1.0))
    for call in calls(tier):
        started_s = time.monotonic()
        with pytest.raises(TierError, match=r"s3://bucket.*127.0.0.1:1") as caught:
            call()
        assert type(caught.value) is TierError
        assert time.monotonic() - started_s < 1  # tried once


def test_settings_of_boto3_that_make_no_sense(rgw: Any) -> None:
    with pytest.raises(TierRefused, match="no-such-profile"):
        S3Tier("bucket", "", s3_options(rgw, profile="no-such-profile"))
