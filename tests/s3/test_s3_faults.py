"""S3 when the network and the store fail: each fault through the proxy, against Ceph, told apart and survived.

Whatever happens, a call ends in time with the right kind of error, which names the object; the same call made again
gives what the first would have given; and nothing is taken for stored, read or missing that is not.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fs.tiers.s3 import S3Tier
from fs.tiers.tier import (
    Tier,
    TierBadBytes,
    TierError,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)
from tests import harness, s3faults
from tests.exchange import Fault
from tests.faultproxy import FaultProxy
from tests.rgw import Rgw
from tests.s3.cases import (
    CALLS,
    EXPECT_S,
    NOT_STORED,
    SHORT_S,
    SILENT,
    SMALL_PART,
    STORED,
    Case,
    Maker,
    begun,
    complete,
    complete_again,
    filled,
    is_expected,
    start,
)
from tests.s3.store import DATA, META, MIB, PART, Store


@pytest.mark.parametrize("make", CALLS)
def test_what_may_pass_is_told_as_such_and_the_next_try_gives_the_same(
    tier: S3Tier, store: Store, proxy: FaultProxy, subtests: pytest.Subtests, make: Maker
) -> None:
    for name, fault in (NOT_STORED | STORED).items():
        store.clear()
        case = make(tier, store)
        with subtests.test(name):
            before = proxy.count(case.operation)
            rule = proxy.inject(fault, operation=case.operation)
            with pytest.raises(TierError, match=r"s3://bucket-\d+/ckpt") as caught:
                case.call(tier)
            # one call, one attempt
            assert (rule.hits, proxy.count(case.operation)) == (1, before + 1)
            check_next_try(tier, store, make, case, caught.value, name in STORED)


@pytest.mark.parametrize("fault", SILENT)
def test_no_answer_comes(
    make_tier: Callable[..., S3Tier],
    rgw: Rgw,
    proxy: FaultProxy,
    subtests: pytest.Subtests,
    fault: str,
) -> None:
    """All calls side by side, each in a bucket of its own: they end in time."""
    stores = [Store(rgw) for _ in CALLS]
    tiers = [make_tier(store.bucket) for store in stores]
    cases = [make(tier, store) for make, tier, store in zip(CALLS, tiers, stores, strict=True)]
    waited_for = {(store.bucket, case.operation) for store, case in zip(stores, cases, strict=True)}

    def fails_in_time(store: Store, case: Case) -> TierError:
        hasty = make_tier(store.bucket, connect_timeout_s=SHORT_S, read_timeout_s=SHORT_S)
        started_s = time.monotonic()
        with pytest.raises(TierError, match=r"s3://bucket-\d+/ckpt") as caught:
            case.call(hasty)
        assert time.monotonic() - started_s < 2 * SHORT_S + EXPECT_S + 2.0
        return caught.value

    with (
        proxy.inject(
            SILENT[fault], when=lambda r: (r.bucket, r.operation) in waited_for, times=None
        ) as rule,
        ThreadPoolExecutor(len(CALLS)) as pool,
    ):
        errors = list(pool.map(fails_in_time, stores, cases))
    assert rule.hits == len(CALLS)
    if fault == "then-nothing":
        silent = [request for request in proxy.requests if request.fault]
        harness.wait_until(
            lambda: all(request.upstream_status for request in silent), 10, "the store's answers"
        )
    for make, tier, store, case, error in zip(CALLS, tiers, stores, cases, errors, strict=True):
        with subtests.test(make.__name__):
            check_next_try(tier, store, make, case, error, fault == "then-nothing")


def check_next_try(
    tier: Tier, store: Store, make: Maker, case: Case, error: TierError, stored: bool
) -> None:
    if make is complete and stored:
        # it looked: the upload is gone
        assert type(error) is TierUploadMissing
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


def test_a_storm(make_tier: Callable[..., S3Tier], store: Store, proxy: FaultProxy) -> None:
    """Every fault at random, four threads: with each call tried until it is answered, all is as without faults."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    faults = [
        *NOT_STORED.values(),
        *STORED.values(),
        *SILENT.values(),
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
    part = PART

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
