"""The fault proxy and the object store behind it, through boto3 as it is: what tests of the durable tier stand on."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests import harness, s3faults
from tests.exchange import Exchange
from tests.faultproxy import FaultProxy
from tests.rgw import Rgw, User

MIB = 1 << 20
DATA = os.urandom(3 * MIB)
CLOSED = (ConnectionClosedError, ConnectionResetError)


@pytest.fixture
def bucket(rgw: Rgw) -> str:
    return rgw.new_bucket()


@pytest.fixture
def client(rgw: Rgw, proxy: FaultProxy) -> Any:
    """Through the proxy: one attempt per call, short timeouts."""
    return plain_client(rgw, proxy.url)


def plain_client(
    rgw: Rgw, url: str, secret_key: str | None = None, read_timeout_s: float = 0.5
) -> Any:
    return rgw.client(
        url,
        secret_key and User(rgw.access_key, secret_key),
        retries={"total_max_attempts": 1},
        connect_timeout=2,
        read_timeout=read_timeout_s,
    )


def stored(rgw: Rgw, bucket: str, key: str = "key") -> bytes | None:
    """What the store holds, asked for beside the proxy."""
    try:
        return bytes(rgw.owner.get_object(Bucket=bucket, Key=key)["Body"].read())
    except ClientError as error:
        assert error.response["Error"]["Code"] == "NoSuchKey"
        return None


def test_without_faults_the_store_is_what_it_is(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str
) -> None:
    key = "dir/a b+ü%~!*'()"
    client.put_object(Bucket=bucket, Key=key, Body=DATA, Metadata={"ckptfs-a": "b c"})
    assert stored(rgw, bucket, key) == DATA
    answer = client.get_object(Bucket=bucket, Key=key, Range="bytes=7-99")
    assert answer["Body"].read() == DATA[7:100]
    assert client.head_object(Bucket=bucket, Key=key)["Metadata"] == {"ckptfs-a": "b c"}
    upload = client.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    of_upload = {"Bucket": bucket, "Key": "parts", "UploadId": upload}
    etag = client.upload_part(**of_upload, PartNumber=1, Body=DATA)["ETag"]
    assert len(client.list_parts(**of_upload)["Parts"]) == 1
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    client.complete_multipart_upload(**of_upload, MultipartUpload=parts)
    client.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "parts"})
    assert stored(rgw, bucket, "copy") == DATA
    found = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in found] == ["copy", key, "parts"]
    client.delete_object(Bucket=bucket, Key="copy")
    assert stored(rgw, bucket, "copy") is None
    expected = (
        "put_object get_object head_object create_multipart_upload upload_part list_parts"
        " complete_multipart_upload copy_object list_objects_v2 delete_object"
    )
    assert [request.operation for request in proxy.requests] == expected.split()
    first = proxy.requests[0]
    assert (first.bucket, first.key, first.body_bytes) == (bucket, key, len(DATA))
    assert (first.status, first.upstream_status, first.fault) == (200, 200, None)
    assert {request.access_key for request in proxy.requests} == {rgw.access_key}


def test_the_store_checks_signatures_through_the_proxy(
    rgw: Rgw, proxy: FaultProxy, bucket: str
) -> None:
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        plain_client(rgw, proxy.url, secret_key="wrong").put_object(
            Bucket=bucket, Key="key", Body=DATA
        )
    other = rgw.client(proxy.url, rgw.add_user())
    with pytest.raises(ClientError, match="AccessDenied"):
        other.put_object(Bucket=bucket, Key="key", Body=DATA)
    assert stored(rgw, bucket) is None


@pytest.mark.parametrize("early", [False, True])
def test_refusals_come_as_often_as_was_said(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str, early: bool
) -> None:
    rule = proxy.inject(s3faults.slow_down(early=early), operation="put_object", nth=2, times=2)

    def put() -> str:
        try:
            client.put_object(Bucket=bucket, Key="key", Body=DATA)
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        return "stored"

    assert [put() for _ in range(5)] == ["stored", "SlowDown", "SlowDown", "stored", "stored"]
    assert [request.fault for request in proxy.seen("put_object")] == [
        *(None, "SlowDown", "SlowDown", None, None)
    ]
    assert rule.hits == 2
    sent = [request.body_bytes for request in proxy.seen("put_object", status=503)]
    assert sent == ([0, 0] if early else [len(DATA)] * 2)
    client.head_object(Bucket=bucket, Key="key")


def test_rules_by_time_by_predicate_and_until_healed(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    def put(key: str) -> None:
        client.put_object(Bucket=bucket, Key=key, Body=b"x")

    proxy.inject(s3faults.internal_error(), times=None, for_s=0.2)
    deadline = time.monotonic() + 5
    failed = 0
    while True:
        try:
            put("a")
            break
        except ClientError:
            failed += 1
            assert time.monotonic() < deadline
    assert failed > 1
    with proxy.inject(s3faults.access_denied(), when=lambda r: r.key == "b", times=None):
        put("a")
        for _ in range(3):
            with pytest.raises(ClientError, match="AccessDenied"):
                put("b")
    put("b")
    proxy.inject(s3faults.no_such_bucket(), operation=("put_object", "head_object"), times=None)
    with pytest.raises(ClientError, match="NoSuchBucket"):
        put("a")
    proxy.heal()
    put("a")


@pytest.mark.parametrize(
    ("fault", "arrived"),
    [
        (s3faults.reset_before_body(), False),
        (s3faults.reset_in_body(MIB), False),
        (s3faults.reset_after_body(), False),
        (s3faults.reset_when_stored(), True),
        (s3faults.truncate_request(MIB), False),
    ],
)
def test_connections_that_end_while_storing(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str, fault: Any, arrived: bool
) -> None:
    proxy.inject(fault)
    with pytest.raises(CLOSED):
        client.put_object(Bucket=bucket, Key="key", Body=DATA)
    assert stored(rgw, bucket) == (DATA if arrived else None)
    request = proxy.requests[0]
    assert (request.status, request.upstream_status) == (None, 200 if arrived else None)
    client.put_object(Bucket=bucket, Key="key", Body=DATA)
    assert stored(rgw, bucket) == DATA


@pytest.mark.parametrize(
    ("fault", "errors"),
    [
        (s3faults.reset_in_answer(MIB), (ResponseStreamingError, ConnectionError)),
        (s3faults.truncate_answer(MIB), (IncompleteReadError, ResponseStreamingError)),
        (s3faults.stall_in_answer(MIB), (ReadTimeoutError,)),
        (s3faults.black_hole(), (ReadTimeoutError,)),
        (s3faults.slow(delay_s=2.0), (ReadTimeoutError,)),
    ],
)
def test_answers_that_do_not_come_whole(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str, fault: Any, errors: Any
) -> None:
    rgw.owner.put_object(Bucket=bucket, Key="key", Body=DATA)
    proxy.inject(fault)
    started_s = time.monotonic()
    with pytest.raises(errors):
        client.get_object(Bucket=bucket, Key="key")["Body"].read()
    assert time.monotonic() - started_s < 1.5
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == DATA


def test_bytes_that_are_damaged_on_the_way(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str
) -> None:
    rgw.owner.put_object(Bucket=bucket, Key="key", Body=DATA)
    damaged = bytearray(DATA)
    damaged[MIB + 5] ^= 1
    proxy.inject(s3faults.flip_byte_of_answer(MIB + 5), operation="get_object")
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == damaged
    proxy.inject(s3faults.truncate_answer(MIB, consistent=True), operation="get_object")
    assert client.get_object(Bucket=bucket, Key="key")["Body"].read() == DATA[:MIB]
    # over http the hash of the body is signed, and Ceph checks it
    for fault in (s3faults.flip_byte_of_request(5), s3faults.truncate_request(9, consistent=True)):
        proxy.inject(fault, operation="put_object")
        with pytest.raises(ClientError, match="XAmzContentSHA256Mismatch"):
            client.put_object(Bucket=bucket, Key="other", Body=DATA)
    assert stored(rgw, bucket, "other") is None


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("keepalive", [False, True])
def test_an_error_inside_of_a_success(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str, happened: bool, keepalive: bool
) -> None:
    of_upload = {"Bucket": bucket, "Key": "key"}
    upload = client.create_multipart_upload(**of_upload)["UploadId"]
    etag = client.upload_part(**of_upload, UploadId=upload, PartNumber=1, Body=DATA)["ETag"]
    proxy.inject(s3faults.error_in_success(stored=happened, keepalive=keepalive))
    with pytest.raises(ClientError, match="InternalError"):
        client.complete_multipart_upload(
            **of_upload,
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]},
        )
    assert proxy.requests[-1].status == 200
    assert stored(rgw, bucket) == (DATA if happened else None)


def test_stored_and_refused(rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str) -> None:
    proxy.inject(s3faults.stored_then())
    with pytest.raises(ClientError, match="SlowDown"):
        client.put_object(Bucket=bucket, Key="key", Body=DATA)
    assert stored(rgw, bucket) == DATA


def test_a_store_whose_clock_is_ahead(
    rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.inject(s3faults.clock_skew(20 * 60, rgw.access_key, rgw.secret_key), times=None)
    with pytest.raises(ClientError, match="RequestTimeTooSkewed") as caught:
        client.put_object(Bucket=bucket, Key="a b", Body=DATA)
    ahead = datetime.timedelta(minutes=20)
    told = caught.value.response["ResponseMetadata"]["HTTPHeaders"]["date"]
    assert f"{datetime.datetime.now(datetime.UTC) + ahead:%H:%M}" in told
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda: datetime.datetime.now(datetime.UTC) + ahead
    )
    client.put_object(Bucket=bucket, Key="a b", Body=DATA, Metadata={"ckptfs-a": "b"})
    assert client.get_object(Bucket=bucket, Key="a b")["Body"].read() == DATA
    assert client.list_objects_v2(Bucket=bucket, Prefix="a b")["KeyCount"] == 1
    proxy.heal()
    with pytest.raises(
        ClientError, match="RequestTimeTooSkewed"
    ):  # Ceph itself, with the real time
        client.list_objects_v2(Bucket=bucket)


def test_credentials_that_are_over(rgw: Rgw, proxy: FaultProxy, client: Any, bucket: str) -> None:
    proxy.inject(s3faults.expired_token(), when=s3faults.signed_by(rgw.access_key), times=None)
    for _ in range(2):
        with pytest.raises(ClientError, match="ExpiredToken"):
            client.put_object(Bucket=bucket, Key="key", Body=DATA)
    new = rgw.client(proxy.url, rgw.second_key())
    new.put_object(Bucket=bucket, Key="key", Body=DATA)
    assert stored(rgw, bucket) == DATA


def test_nobody_listens_for_a_while(proxy: FaultProxy, client: Any, bucket: str) -> None:
    client.head_bucket(Bucket=bucket)
    url = proxy.url
    proxy.refuse()
    for _ in range(2):
        with pytest.raises((EndpointConnectionError, *CLOSED)):
            client.head_bucket(Bucket=bucket)
    proxy.listen()
    assert proxy.url == url
    client.head_bucket(Bucket=bucket)


def test_many_at_once_and_an_end_while_some_hang(rgw: Rgw, bucket: str) -> None:
    before = threading.active_count()
    with FaultProxy(rgw.port) as proxy:
        proxy.inject(s3faults.black_hole(), when=lambda r: r.key == "hangs", times=None)
        client = plain_client(rgw, proxy.url, read_timeout_s=30)

        def put(key: str) -> None:
            try:
                client.put_object(Bucket=bucket, Key=key, Body=DATA[:MIB])
            except CLOSED:
                assert key == "hangs"

        keys = [*(f"{n}" for n in range(8)), "hangs"]
        threads = [threading.Thread(target=put, args=(key,)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join(30)
        assert proxy.count("put_object") == 9
        assert threads[-1].is_alive()
    threads[-1].join(30)
    assert not threads[-1].is_alive()
    harness.wait_until(lambda: threading.active_count() <= before, 10, "the end of all threads")
    assert stored(rgw, bucket, "hangs") is None
    assert stored(rgw, bucket, "7") == DATA[:MIB]


def test_a_fault_of_a_test_of_its_own(proxy: FaultProxy, client: Any, bucket: str) -> None:
    def teapot(exchange: Exchange) -> None:
        exchange.answer(418, s3faults.error_xml("Teapot", exchange.request.key))

    proxy.inject(teapot, operation="put_object")
    with pytest.raises(ClientError, match=r"Teapot.*some key"):
        client.put_object(Bucket=bucket, Key="some key", Body=DATA)
    assert proxy.requests[0].fault == "test_a_fault_of_a_test_of_its_own"


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_store_ends_with_its_test_process(end: str, tmp_path: Path, rgw: Rgw) -> None:
    script = (
        "import pathlib, sys; from tests.rgw import Rgw; rgw = Rgw.start(pathlib.Path(sys.argv[1]))\n"
        "print(*(process.pid for process in rgw._processes), flush=True); sys.stdin.read(); rgw.close()"
    )
    base = tmp_path / "rgw"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(base)],
        cwd=harness.REPO_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin and process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        if end == "kill":
            process.kill()
        process.stdin.close()
        process.wait(30)
        harness.wait_until(lambda: not any(map(harness.pid_alive, pids)), 10, f"the end of {pids}")
        assert base.exists() is (end == "kill")
    finally:
        process.kill()
        process.wait(30)
