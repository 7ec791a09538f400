"""S3 that is away for a while, credentials that expire, and clocks that differ: waited out, and found by itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from fs.retry import Caller
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import (
    TierError,
)
from tests import s3faults
from tests.faultproxy import FaultProxy
from tests.rgw import Rgw, User
from tests.s3.cases import (
    CALLS,
    Maker,
    filled,
    is_expected,
)
from tests.s3.store import DATA, META, PART, Store


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
