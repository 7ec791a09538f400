"""S3 when the network and the store fail: each fault through the proxy, against Ceph, told apart and survived.

Whatever happens, a call ends in time with the right kind of error, which names the object; the same call made again
gives what the first would have given; and nothing is taken for stored, read or missing that is not.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from trio.testing import MockClock

from fs.retry import Caller
from fs.tiers import s3client
from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import (
    Tier,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)
from tests import s3faults
from tests.faultproxy import Exchange, Fault, FaultProxy
from tests.httpwire import Head
from tests.rgw import Rgw, User

MIB = 1 << 20
DATA = os.urandom(MIB)
PART = os.urandom(5 * MIB)
SMALL_PART = os.urandom(MIB // 4)
# Of the calls that are to time out; all else gets as long as a busy machine may need.
SHORT_S = 0.4
EXPECT_S = 1.0  # botocore waits as long to be asked for a body
META = {"ckptfs-kind": "file"}


@pytest.fixture
def bucket(rgw: Rgw) -> str:
    return rgw.new_bucket()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, rgw: Rgw) -> None:
    """Nothing of the user's own; the gateway's credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in rgw.credentials_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.0)


@pytest.fixture
def make_tier(environment: None, proxy: FaultProxy, bucket: str) -> Callable[..., S3Tier]:
    def make(**changes: Any) -> S3Tier:
        timeouts = {"connect_timeout_s": 20.0, "read_timeout_s": 20.0}
        options = S3Options(endpoint_url=proxy.url, region="us-east-1", **(timeouts | changes))
        return S3Tier(bucket, "ckpt", options)

    return make


@pytest.fixture
def tier(make_tier: Callable[..., S3Tier]) -> S3Tier:
    return make_tier()


@pytest.fixture
def hasty(make_tier: Callable[..., S3Tier]) -> S3Tier:
    """One that does not wait long."""
    return make_tier(connect_timeout_s=SHORT_S, read_timeout_s=SHORT_S)


class Store:
    """The bucket as others see it, beside the proxy."""

    def __init__(self, rgw: Rgw, bucket: str) -> None:
        self.client = rgw.owner
        self.bucket = bucket

    def clear(self) -> None:
        """As at the beginning."""
        for upload in self._uploads():
            self.client.abort_multipart_upload(
                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        for key in self.objects():
            self.client.delete_object(Bucket=self.bucket, Key=f"ckpt/{key}")

    def put(self, key: str, data: bytes = DATA) -> str:
        answer = self.client.put_object(
            Bucket=self.bucket, Key=f"ckpt/{key}", Body=data, Metadata=META
        )
        return str(answer["ETag"]).strip('"')

    def objects(self) -> dict[str, bytes]:
        """All objects, by key."""
        listed = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        keys = [entry["Key"] for entry in listed]
        return {
            key.removeprefix("ckpt/"): self.client.get_object(Bucket=self.bucket, Key=key)[
                "Body"
            ].read()
            for key in keys
        }

    def uploads(self) -> list[str]:
        """Keys of the multipart uploads that are under way."""
        return [upload["Key"].removeprefix("ckpt/") for upload in self._uploads()]

    def _uploads(self) -> list[Any]:
        return list(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))


@pytest.fixture
def store(rgw: Rgw, bucket: str) -> Store:
    return Store(rgw, bucket)


# one call of each kind


class Case(NamedTuple):
    """*call*: what is tried. *happened*: whether its effect is there; None for calls that only ask."""

    operation: str  # the request that fails
    call: Callable[[Tier], Any]
    expected: Any
    happened: Callable[[], bool] | None = None


ANY = object()
Maker = Callable[[Tier, Store], Case]


def put(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "put_object",
        lambda tier: tier.put("new", DATA, META),
        etag,
        lambda: store.objects().get("new") == DATA,
    )


def delete(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case(
        "delete_object", lambda tier: tier.delete("there"), None, lambda: not store.objects()
    )


def copy(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "copy_object",
        lambda tier: tier.copy("there", "new", META, etag),
        etag,
        lambda: store.objects().get("new") == DATA,
    )


def head(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case("head_object", lambda tier: tier.head("there").etag, etag)


def read(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case("get_object", lambda tier: tier.read("there", MIB)[0], DATA)


def read_into(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "get_object", lambda tier: filled(tier, "there", 5, MIB - 9, etag), DATA[5 : MIB - 4]
    )


def list_page(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case(
        "list_objects_v2", lambda tier: [found.key for found in tier.list("").objects], ["there"]
    )


def check(tier: Tier, store: Store) -> Case:
    return Case("list_objects_v2", lambda tier: tier.check(), None)


def start(tier: Tier, store: Store) -> Case:
    return Case(
        "create_multipart_upload",
        lambda tier: tier.start("parts", META),
        ANY,
        lambda: bool(store.uploads()),
    )


def begun(tier: Tier) -> tuple[str, list[tuple[int, str]]]:
    upload = tier.start("parts", META)
    return upload, [(1, tier.put_part("parts", upload, 1, SMALL_PART))]


def put_part(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    store_etag = store.put("same", SMALL_PART)
    return Case(
        "upload_part", lambda tier: tier.put_part("parts", upload, 2, SMALL_PART), store_etag
    )


def parts(tier: Tier, store: Store) -> Case:
    upload, sent = begun(tier)
    return Case(
        "list_parts",
        lambda tier: [(part.number, part.etag) for part in tier.parts("parts", upload)],
        sent,
    )


def uploads(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    return Case(
        "list_multipart_uploads",
        lambda tier: [found.upload_id for found in tier.uploads("")],
        [upload],
    )


def abort(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    return Case(
        "abort_multipart_upload",
        lambda tier: tier.abort("parts", upload),
        None,
        lambda: not store.uploads(),
    )


def complete(tier: Tier, store: Store) -> Case:
    upload, sent = begun(tier)
    return Case(
        "complete_multipart_upload",
        lambda tier: tier.complete("parts", upload, sent),
        ANY,
        lambda: store.objects().get("parts") == SMALL_PART,
    )


ASKING: tuple[Maker, ...] = (head, read, read_into, list_page, check, parts, uploads)
CALLS: tuple[Maker, ...] = (*ASKING, put, delete, copy, start, put_part, abort, complete)


def is_expected(case: Case, result: Any) -> bool:
    return bool(result) if case.expected is ANY else bool(result == case.expected)


def complete_again(tier: Tier, case: Case) -> None:
    """What was completed, and nobody knows: either it says that the upload is gone, or that all is well."""
    info = tier.head("parts")
    assert (info.size, info.meta) == (len(SMALL_PART), META)
    try:
        assert case.call(tier) == info.etag
    except TierUploadMissing:
        assert tier.head("parts") == info


def filled(tier: Tier, key: str, offset: int, length: int, etag: str | None) -> bytes:
    buffer = bytearray(length)
    tier.read_into(key, offset, memoryview(buffer), etag)
    return bytes(buffer)


NOT_STORED = {
    "SlowDown": s3faults.slow_down(),
    "SlowDown-early": s3faults.slow_down(early=True),
    "InternalError": s3faults.internal_error(),
    "reset-before": s3faults.reset_before_body(),
    "reset-after": s3faults.reset_after_body(),
    "black-hole": s3faults.black_hole(),
}
STORED = {
    "then-503": s3faults.stored_then(503, "SlowDown"),
    "then-500": s3faults.stored_then(500, "InternalError"),
    "then-reset": s3faults.reset_when_stored(),
    "then-nothing": s3faults.black_hole_when_stored(),
}


TIMING_OUT = ("black-hole", "then-nothing")


@pytest.mark.parametrize("make", CALLS)
def test_what_may_pass_is_told_as_such_and_the_next_try_gives_the_same(
    tier: S3Tier,
    hasty: S3Tier,
    store: Store,
    proxy: FaultProxy,
    subtests: pytest.Subtests,
    make: Maker,
) -> None:
    for name, fault in (NOT_STORED | STORED).items():
        store.clear()
        case = make(tier, store)
        with subtests.test(name):
            before = proxy.count(case.operation)
            rule = proxy.inject(fault, operation=case.operation)
            started_s = time.monotonic()
            with pytest.raises(TierError, match=r"s3://bucket-\d+/ckpt") as caught:
                case.call(hasty if name in TIMING_OUT else tier)
            assert time.monotonic() - started_s < 2 * SHORT_S + EXPECT_S + 1.0
            # one call, one attempt
            assert (rule.hits, proxy.count(case.operation)) == (1, before + 1)
            check_next_try(tier, store, make, case, caught.value, name in STORED)


def check_next_try(
    tier: Tier, store: Store, make: Maker, case: Case, error: TierError, stored: bool
) -> None:
    if make is complete and stored:
        assert type(error) is TierUploadMissing  # it looked: the upload is gone
        complete_again(tier, case)
    else:
        assert type(error) is TierError
        if case.happened is not None:
            assert case.happened() is stored
        assert is_expected(case, case.call(tier))
    if make is start and stored:
        assert len(store.uploads()) == 2  # the ledger knows of the first, and the janitor finds it
    assert case.happened is None or case.happened()


@pytest.mark.parametrize("make", CALLS)
def test_what_will_not_pass_is_refused_and_goes_on_when_it_is_put_right(
    tier: S3Tier, store: Store, proxy: FaultProxy, make: Maker
) -> None:
    case = make(tier, store)
    for refusal, hint in (
        (s3faults.access_denied(), "AccessDenied.*check the policies"),
        (s3faults.no_such_bucket(), "NoSuchBucket.*create the bucket"),
    ):
        with proxy.inject(refusal, times=None):
            for _ in range(2):
                with pytest.raises(TierRefused, match=rf"s3://bucket-\d+/ckpt.*{hint}"):
                    case.call(tier)
    assert is_expected(case, case.call(tier))
    assert case.happened is None or case.happened()


# answers that come in part, or damaged


@pytest.mark.parametrize("make", ASKING[1:])
def test_an_answer_that_is_cut_off_is_never_taken_for_the_whole(
    tier: S3Tier, store: Store, proxy: FaultProxy, subtests: pytest.Subtests, make: Maker
) -> None:
    case = make(tier, store)
    for count, consistent in itertools.product((0, 1, 60), (False, True)):
        with subtests.test(f"{count} bytes, {consistent=}"):
            fault = s3faults.truncate_answer(count, consistent=consistent)
            proxy.inject(fault, operation=case.operation)
            if make is read and consistent:
                # a whole answer, which says that the object is short; its digests say what it should be
                assert case.call(tier) == DATA[:count]
            else:
                with pytest.raises(TierError, match=r"s3://bucket-\d+/ckpt") as caught:
                    case.call(tier)
                assert type(caught.value) in (TierError, TierBadBytes)
            assert case.call(tier) == case.expected


@pytest.mark.parametrize("make", [read, read_into, list_page])
@pytest.mark.parametrize("kind", [s3faults.reset_in_answer, s3faults.stall_in_answer])
def test_a_connection_that_ends_or_stalls_within_an_answer(
    hasty: S3Tier, tier: S3Tier, store: Store, proxy: FaultProxy, make: Maker, kind: Any
) -> None:
    case = make(tier, store)
    proxy.inject(kind(40 if make is list_page else MIB // 2), operation=case.operation)
    started_s = time.monotonic()
    with pytest.raises(TierError, match=r"s3://bucket-\d+/ckpt") as caught:
        case.call(hasty)
    assert type(caught.value) in (TierError, TierBadBytes)
    assert time.monotonic() - started_s < SHORT_S + 1.0
    assert case.call(tier) == case.expected


@pytest.mark.parametrize("make", [head, read, read_into, list_page])
def test_a_refusal_that_comes_in_part(
    hasty: S3Tier,
    tier: S3Tier,
    store: Store,
    proxy: FaultProxy,
    subtests: pytest.Subtests,
    make: Maker,
) -> None:
    """Such as "no such key": half of it is not an answer."""
    case = make(tier, store)
    body = s3faults.error_xml("NoSuchKey", "x" * 500)

    def refuse_in_part(exchange: Exchange) -> None:
        head = Head("HTTP/1.1 404 Not Found", [("Content-Length", str(len(body)))])
        exchange.relay(head, [] if exchange.request.method == "HEAD" else [body[:99]])
        if exchange.request.method != "HEAD":
            time.sleep(0.02)
            {"reset": exchange.reset, "cut": exchange.end, "stall": exchange.hang}[spoil]()

    for spoil in ("reset", "cut", "stall"):
        with subtests.test(spoil):
            with proxy.inject(refuse_in_part, times=None), pytest.raises(TierError) as caught:
                case.call(hasty)
            assert type(caught.value) is TierError
            assert case.call(tier) == case.expected


BODY_FAULTS = [
    (s3faults.reset_in_body(MIB // 8), TierError),
    (s3faults.truncate_request(MIB // 8), TierError),
    (s3faults.truncate_request(MIB // 8, consistent=True), TierBadBytes),
    (s3faults.flip_byte_of_request(MIB // 8), TierBadBytes),
]


@pytest.mark.parametrize(("fault", "kind"), BODY_FAULTS)
def test_a_body_that_does_not_arrive_as_it_was_sent_is_not_stored(
    tier: S3Tier, store: Store, proxy: FaultProxy, fault: Fault, kind: type[TierError]
) -> None:
    etag = store.put("file", b"as it was")
    proxy.inject(fault, operation="put_object")
    with pytest.raises(TierError) as caught:
        tier.put("file", DATA, META)
    assert type(caught.value) is kind
    assert tier.head("file").etag == etag
    tier.put("file", DATA, META)
    assert store.objects() == {"file": DATA}


@pytest.mark.parametrize(("fault", "kind"), BODY_FAULTS)
def test_a_part_that_does_not_arrive_as_it_was_sent_is_not_there(
    tier: S3Tier, store: Store, proxy: FaultProxy, fault: Fault, kind: type[TierError]
) -> None:
    upload, sent = begun(tier)
    proxy.inject(fault, operation="upload_part")
    with pytest.raises(TierError) as caught:
        tier.put_part("parts", upload, 1, os.urandom(len(SMALL_PART)))
    assert type(caught.value) is kind
    assert [(part.number, part.etag) for part in tier.parts("parts", upload)] == sent
    tier.complete("parts", upload, sent)
    assert store.objects() == {"parts": SMALL_PART}


# successes that are none


@pytest.mark.parametrize("keepalive", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("make", [complete, copy])
def test_an_error_inside_of_a_success_is_an_error(
    tier: S3Tier, store: Store, proxy: FaultProxy, make: Maker, stored: bool, keepalive: bool
) -> None:
    case = make(tier, store)
    assert case.happened is not None
    proxy.inject(
        s3faults.error_in_success(stored=stored, keepalive=keepalive), operation=case.operation
    )
    with pytest.raises(TierError) as caught:
        case.call(tier)
    assert case.happened() is stored
    if make is complete and stored:
        assert type(caught.value) is TierUploadMissing
        complete_again(tier, case)
    else:
        assert type(caught.value) is TierError
        assert is_expected(case, case.call(tier))
    assert case.happened()


def test_an_error_inside_of_a_success_while_copying_in_parts_leaves_no_upload(
    tier: S3Tier, store: Store, proxy: FaultProxy
) -> None:
    tier.limits = tier.limits._replace(max_copy_bytes=MIB)
    tier.copy_part_bytes = 5 * MIB
    data = os.urandom(12 * MIB)
    etag = store.put("there", data)
    for operation in ("upload_part_copy", "complete_multipart_upload"):
        proxy.inject(s3faults.error_in_success(stored=False), operation=operation)
        with pytest.raises(TierError) as caught:
            tier.copy("there", "new", META, etag)
        assert type(caught.value) is TierError
        assert store.uploads() == []
        assert "new" not in store.objects()
    tier.copy("there", "new", META, etag)
    assert store.objects()["new"] == data


def test_a_success_that_says_nothing_is_none(tier: S3Tier, store: Store, proxy: FaultProxy) -> None:
    etag = store.put("there")

    def empty(exchange: Exchange) -> None:
        exchange.relay(Head("HTTP/1.1 200 OK", [("Connection", "close")]), [])
        exchange.end()

    calls: list[Callable[[], Any]] = [
        lambda: tier.head("there"),
        lambda: tier.read("there", MIB),
        lambda: filled(tier, "there", 0, MIB, etag),
        lambda: tier.put("there", DATA, META),
        lambda: tier.copy("there", "new", META, etag),
        lambda: tier.start("parts", META),
    ]
    for call in calls:
        with proxy.inject(empty, times=None), pytest.raises(TierError) as caught:
            call()
        # without an ETag it is not the version that was asked for
        assert type(caught.value) in (TierError, TierBadBytes, TierObjectChanged)
    assert tier.head("there").etag == etag


# time


@pytest.mark.parametrize("body_bytes", [0, 64 * MIB])
def test_a_black_hole_ends_in_time(
    hasty: S3Tier, tier: S3Tier, proxy: FaultProxy, body_bytes: int
) -> None:
    """Also while a body is being sent that nobody takes: one piece may take the time of a connect."""
    rule = proxy.inject(s3faults.black_hole(), times=None)
    body = bytes(body_bytes)
    started_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(hasty.put, f"{n}", body, META) for n in range(3)]
        errors = [future.exception() for future in waiting]
    assert time.monotonic() - started_s < 4
    assert [type(error) for error in errors] == [TierError] * 3
    rule.remove()
    tier.put("0", b"x", META)


def test_a_slow_answer_is_not_a_failed_one(
    make_tier: Callable[..., S3Tier], store: Store, proxy: FaultProxy
) -> None:
    """read_timeout_s bounds silence, not the whole transfer."""
    etag = store.put("file")
    proxy.inject(s3faults.slow(bytes_per_s=0.8 * MIB), times=None)
    started_s = time.monotonic()
    assert filled(make_tier(read_timeout_s=0.7), "file", 0, MIB, etag) == DATA
    assert time.monotonic() - started_s > 1.0


def test_bursts_of_503_are_waited_out_and_seen_meanwhile(
    tier: S3Tier, store: Store, proxy: FaultProxy
) -> None:
    """As the writeback calls the tier: the reason and how often are visible; never is it ENOENT."""
    etag = store.put("there", DATA)
    proxy.inject(s3faults.slow_down(), times=3, operation="put_object")
    proxy.inject(s3faults.internal_error(), times=2, operation="head_object")
    troubles = []

    async def watch(caller: Caller) -> None:
        while True:
            troubles.extend(caller.troubles.values())
            await trio.sleep(0.005)

    async def main() -> None:
        caller = Caller(trio.CapacityLimiter(4))
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, caller)
                stored = await caller.call("new", "storing", partial(tier.put, "new", DATA, META))
                info = await caller.call("there", "asking for", partial(tier.head, "there"))
                nursery.cancel_scope.cancel()
        assert (stored, info.etag) == (etag, etag)
        assert (caller.retries, caller.troubles) == (5, {})

    trio.run(main)
    seen = {trouble.attempts for trouble in troubles if trouble.key == "new"}
    assert seen
    assert seen <= {1, 2, 3}
    assert all("SlowDown" in trouble.reason for trouble in troubles if trouble.key == "new")
    assert all(not trouble.permanent for trouble in troubles)
    assert store.objects()["new"] == DATA


def test_ten_minutes_of_503(tier: S3Tier, store: Store, proxy: FaultProxy) -> None:
    """By a clock that jumps over the waits: tried to the end, ever more rarely, and soon after the end it is stored."""
    clock = MockClock(autojump_threshold=0.05)
    ten_minutes_s = 600.0
    begun_s = clock.current_time()
    tried_s: list[float] = []

    def is_down(_: object) -> bool:
        tried_s.append(clock.current_time() - begun_s)
        return tried_s[-1] < ten_minutes_s

    proxy.inject(s3faults.slow_down(), times=None, operation="put_object", when=is_down)

    async def main() -> None:
        caller = Caller(trio.CapacityLimiter(4))
        await caller.call("new", "storing", partial(tier.put, "new", DATA, META))

    trio.run(main, clock=clock)
    assert ten_minutes_s <= tried_s[-1] <= ten_minutes_s + 31
    assert 15 < len(tried_s) < 150
    assert store.objects() == {"new": DATA}


# credentials and clocks


@pytest.fixture
def credentials_file(
    monkeypatch: pytest.MonkeyPatch, environment: None, tmp_path: Path
) -> Callable[[User], None]:
    """Writes the shared credentials file, from which boto3 takes them now; replaced in one step."""
    file = tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(user: User) -> None:
        new = tmp_path / "new"
        new.write_text(
            f"[default]\naws_access_key_id={user.access_key}\naws_secret_access_key={user.secret_key}\n"
        )
        new.replace(file)

    return write


def test_credentials_that_expire_in_the_middle_of_a_multipart_upload(
    credentials_file: Callable[[User], None],
    make_tier: Callable[..., S3Tier],
    store: Store,
    proxy: FaultProxy,
    rgw: Rgw,
) -> None:
    old, new = User(rgw.access_key, rgw.secret_key), rgw.second_key()
    credentials_file(old)
    tier = make_tier()
    upload = tier.start("file", META)
    parts = [(1, tier.put_part("file", upload, 1, PART))]
    proxy.inject(s3faults.expired_token(), when=s3faults.signed_by(old.access_key), times=None)
    numbers = range(2, 6)

    def put_part(number: int) -> tuple[int, str]:
        return number, tier.put_part("file", upload, number, PART)

    with ThreadPoolExecutor(4) as pool:
        for number in numbers:
            with pytest.raises(TierError, match=r"ExpiredToken.*new ones are looked for") as caught:
                put_part(number)
            assert type(caught.value) is TierError
        credentials_file(new)
        with pytest.raises(TierError, match="ExpiredToken"):
            put_part(2)  # refused once more, and new ones are looked for
        parts += pool.map(put_part, numbers)
    tier.complete("file", upload, parts)
    assert store.objects() == {"file": PART * 5}
    assert {request.access_key for request in proxy.requests[-5:]} == {new.access_key}


@pytest.mark.parametrize("make", CALLS)
def test_every_call_finds_new_credentials(
    credentials_file: Callable[[User], None],
    make_tier: Callable[..., S3Tier],
    store: Store,
    proxy: FaultProxy,
    rgw: Rgw,
    make: Maker,
) -> None:
    old, new = User(rgw.access_key, rgw.secret_key), rgw.second_key()
    credentials_file(old)
    tier = make_tier()
    case = make(tier, store)
    proxy.inject(s3faults.expired_token(), when=s3faults.signed_by(old.access_key), times=None)
    credentials_file(new)
    with pytest.raises(TierError, match=r"ExpiredToken|HTTP 400") as caught:
        case.call(tier)
    assert type(caught.value) is TierError
    assert is_expected(case, case.call(tier))


@pytest.mark.parametrize("ahead_s", [20 * 60, -20 * 60])
def test_a_clock_that_differs_from_the_stores(
    tier: S3Tier, store: Store, proxy: FaultProxy, rgw: Rgw, ahead_s: int
) -> None:
    fault = s3faults.clock_skew(ahead_s, rgw.access_key, rgw.secret_key)
    rule = proxy.inject(fault, times=None)
    with pytest.raises(TierError, match=r"RequestTimeTooSkewed.*clock") as caught:
        tier.put("dir/a b", DATA, META)
    assert type(caught.value) is TierError
    tier.put("dir/a b", DATA, META)
    upload = tier.start("file", META)
    with ThreadPoolExecutor(4) as pool:
        etags = list(pool.map(lambda n: tier.put_part("file", upload, n, PART), range(1, 4)))
    tier.complete("file", upload, list(enumerate(etags, 1)))
    assert filled(tier, "file", 7, 3 * len(PART) - 7, None) == (PART * 3)[7:]
    assert [found.key for found in tier.list("", deep=True).objects] == ["dir/a b", "file"]
    assert [request.status for request in proxy.requests].count(403) == 1
    rule.remove()  # somebody sets the clock: refused once, by Ceph itself
    with pytest.raises(TierError, match="RequestTimeTooSkewed"):
        tier.head("file")
    assert tier.head("file").size == 3 * len(PART)


# all at once


def test_a_storm(make_tier: Callable[..., S3Tier], store: Store, proxy: FaultProxy) -> None:
    """Every fault at random, four threads: with each call tried until it is answered, all is as without faults."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    faults = [
        *NOT_STORED.values(),
        *STORED.values(),
        s3faults.reset_in_body(9000),
        s3faults.truncate_request(9000),
        s3faults.truncate_request(9000, consistent=True),
        s3faults.flip_byte_of_request(9000),
        s3faults.truncate_answer(9),
        s3faults.reset_in_answer(9),
    ]
    for fault in faults:
        proxy.inject(fault, when=lambda _: rng.random() < 0.025, times=None)
    tier = make_tier(connect_timeout_s=0.7, read_timeout_s=0.7)
    part = PART[: 5 * MIB]

    def insist(function: Callable[[], Any]) -> Any:
        for _ in range(60):
            try:
                return function()
            except (TierObjectMissing, TierUploadMissing):
                raise
            except TierError as error:
                assert not isinstance(error, TierRefused), error
        raise AssertionError("no end of failures")

    def one(number: int) -> None:
        small, large = f"small-{number}", f"large-{number}"
        insist(lambda: tier.put(small, DATA[number:], META))
        with pytest.raises(TierObjectMissing):
            insist(lambda: tier.head(f"nothing-{number}"))
        upload = insist(lambda: tier.start(large, META))
        etags = [insist(lambda n=n: tier.put_part(large, upload, n, part)) for n in range(1, 3)]
        try:
            insist(lambda: tier.complete(large, upload, list(enumerate(etags, 1))))
        except TierUploadMissing:
            assert insist(lambda: tier.head(large)).size == 2 * len(part)
        etag = insist(lambda: tier.head(large)).etag
        found = insist(lambda: filled(tier, large, number, 2 * len(part) - number, etag))
        assert found == (part * 2)[number:]
        insist(lambda: tier.copy(small, f"copy-{number}", META, None))
        insist(lambda: tier.delete(small))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8)))
    proxy.heal()
    expected = {f"copy-{n}": DATA[n:] for n in range(8)}
    expected |= {f"large-{n}": part * 2 for n in range(8)}
    assert store.objects() == expected
    assert len([request for request in proxy.requests if request.fault]) > 20
