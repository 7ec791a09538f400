"""Answers of S3 that come in part, or say nothing, or say success and are none: never taken for the whole."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from fs.tiers.s3 import S3Tier
from fs.tiers.tier import (
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierUploadMissing,
)
from tests import s3faults
from tests.exchange import Exchange
from tests.faultproxy import FaultProxy
from tests.httpwire import Head
from tests.s3.cases import (
    ASKING,
    SHORT_S,
    Maker,
    complete,
    complete_again,
    copy,
    filled,
    head,
    is_expected,
    list_page,
    read,
    read_into,
)
from tests.s3.store import DATA, META, MIB, Store

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

    for spoil in ("reset", "cut", "stall") if make is read else ("reset", "cut"):
        with subtests.test(spoil):
            with proxy.inject(refuse_in_part, times=None), pytest.raises(TierError) as caught:
                case.call(hasty)
            assert type(caught.value) is TierError
            assert case.call(tier) == case.expected


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
