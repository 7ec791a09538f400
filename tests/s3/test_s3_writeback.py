"""Writeback to a real S3 that fails: nothing is lost, the bucket is a consistent cut at every instant, nobody waits.

The node runs without a mount (tests.durable_node), its requests go through the fault proxy to Ceph. What the bucket
holds is asked for beside the proxy.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from fs.tiers.s3 import S3Tier
from tests import s3faults
from tests.durable_node import DurableNode, run
from tests.exchange import Fault
from tests.faultproxy import FaultProxy
from tests.rgw import Rgw, User
from tests.s3.node import SIZES, drained, finished
from tests.s3.store import MIB, Store
from tests.s3requests import Request
from tests.test_writeback import Job, check_cut

STORM = [
    s3faults.slow_down(),
    s3faults.internal_error(),
    s3faults.reset_before_body(),
    s3faults.reset_after_body(),
    s3faults.stored_then(),
    s3faults.reset_when_stored(),
    s3faults.error_in_success(stored=True),
    s3faults.error_in_success(stored=False, keepalive=True),
    s3faults.truncate_answer(20),
    s3faults.black_hole(),
    s3faults.black_hole_when_stored(),
]
STORM_IN_BODIES = [
    s3faults.reset_in_body(10),
    s3faults.truncate_request(10),
    s3faults.truncate_request(10, consistent=True),
    s3faults.flip_byte_of_request(10),
]


def has_body(request: Request) -> bool:
    return int(request.headers.get("content-length", "0")) > 100


@pytest.mark.parametrize("attempt", range(2))
def test_a_storm_and_at_every_instant_the_bucket_is_a_consistent_cut(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    store: Store,
    attempt: int,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, dice = random.Random(seed), random.Random(seed + 1)
    wrong: list[str] = []
    changes = 0

    def look(request: Request) -> None:
        nonlocal changes
        changes += 1
        try:
            check_cut(store.markers())
        except AssertionError as error:
            wrong.append(f"after {request.operation} {request.key} ({request.fault}): {error}")

    async def main() -> None:
        # answers may wait for `look`
        node = DurableNode(
            tmp_path, make_tier(connect_timeout_s=1.0, read_timeout_s=1.0), sizes=SIZES
        )
        await node.mkdir("run")
        job = Job(node, rng)
        async with node.running():
            for step in range(12):
                await (job.save() if step < 3 else job.any())
                if rng.random() < 0.5:
                    await trio.sleep(rng.random() * 0.05)
                    node.writeback.hurry()
            await drained(node)
            proxy.heal()
            await finished(node, store)
        node.close()

    proxy.on_change = look
    for fault in STORM:
        proxy.inject(fault, when=lambda _: dice.random() < 0.012, times=None)
    for fault in STORM_IN_BODIES:
        proxy.inject(fault, when=lambda r: has_body(r) and dice.random() < 0.02, times=None)
    run(main)
    assert not wrong, wrong[0]
    assert changes > 10


@pytest.mark.parametrize("fault", [s3faults.reset_when_stored(), s3faults.stored_then(500)])
def test_an_upload_that_was_begun_and_nobody_knows_is_given_up(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    store: Store,
    fault: Fault,
) -> None:
    """Its parts would be paid for for ever. What others began under the same key stays."""
    others = store.begin("file")
    proxy.inject(s3faults.slow_down(), operation="list_multipart_uploads")
    proxy.inject(fault, operation="create_multipart_upload", times=3)

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(), sizes=SIZES)
        async with node.running():
            await node.write("file", b"f" * (2 * MIB))
            await drained(node)
            await node.tidied()
        assert store.objects() == await node.tree()
        node.close()

    run(main)
    assert store.upload_ids() == [others]
    assert proxy.count("create_multipart_upload") == 4


def test_the_trouble_of_what_nobody_wants_any_more_is_over(
    tmp_path: Path, make_tier: Callable[..., S3Tier], proxy: FaultProxy, store: Store
) -> None:
    proxy.inject(s3faults.slow_down(), operation="create_multipart_upload", times=None)

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(), sizes=SIZES)
        async with node.running():
            await node.write("file", b"f" * (2 * MIB))
            with trio.fail_after(10):
                while not node.store.caller.troubles:  # noqa: ASYNC110 (nothing tells)
                    await trio.sleep(0.01)
            await node.write("file", b"small now")
            await finished(node, store)
        node.close()

    run(main)


def test_nothing_local_waits_for_a_black_hole(
    tmp_path: Path, make_tier: Callable[..., S3Tier], proxy: FaultProxy, store: Store
) -> None:
    proxy.inject(s3faults.black_hole(), times=None)

    async def main() -> None:
        node = DurableNode(
            tmp_path, make_tier(connect_timeout_s=1.0, read_timeout_s=1.0), sizes=SIZES
        )
        await node.mkdir("d")
        async with node.running():
            slowest_s = 0.0
            for number in range(40):
                started_s = time.monotonic()
                await node.write(f"d/{number}", bytes([number]) * 100_000)
                await node.rename(f"d/{number}", f"d/renamed-{number}")
                slowest_s = max(slowest_s, time.monotonic() - started_s)
                await trio.sleep(0.04)
            assert slowest_s < 0.5
            with trio.fail_after(10):
                while not node.store.caller.troubles:  # noqa: ASYNC110 (nothing tells)
                    await trio.sleep(0.02)
            (trouble, *_) = node.store.caller.troubles.values()
            assert "timeout" in trouble.reason.lower()
            assert not trouble.permanent
            assert store.keys() == []
            proxy.heal()
            await finished(node, store)
        node.close()

    run(main)


@pytest.mark.parametrize("refusal", [s3faults.access_denied(), s3faults.no_such_bucket()])
def test_a_refusal_is_an_alarm_and_keeps_the_data(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    store: Store,
    refusal: Fault,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule = proxy.inject(refusal, times=None)
    code = refusal.__qualname__

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(), sizes=SIZES)
        async with node.running():
            await node.write("small", b"s")
            await node.write("large", b"l" * (3 * MIB))
            with trio.fail_after(10):
                while len(node.store.caller.troubles) < 2:  # noqa: ASYNC110 (nothing tells)
                    await trio.sleep(0.02)
            for key in ("small", "large"):
                trouble = node.store.caller.troubles[key]
                assert trouble.permanent
                assert code in trouble.reason
            before = len(proxy.requests)
            await trio.sleep(1.0)
            assert len(proxy.requests) - before <= 2  # rarely, though it goes on
            rule.remove()
            await finished(node, store)
        node.close()

    run(main)
    alarms = [record for record in caplog.records if record.levelname == "ERROR"]
    assert any(code in alarm.getMessage() for alarm in alarms)


def test_credentials_that_expire_while_a_file_is_uploaded(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    store: Store,
    rgw: Rgw,
    credentials_file: Callable[[User], None],
) -> None:
    """What was sent is not sent again."""
    old, new = User(rgw.access_key, rgw.secret_key), rgw.second_key()
    credentials_file(old)

    def is_over(request: Request) -> bool:
        return (
            request.access_key == old.access_key and len(proxy.seen("upload_part", status=200)) >= 2
        )

    proxy.inject(s3faults.expired_token(), when=is_over, times=None)

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(), sizes=SIZES)

        def has_expired() -> bool:
            troubles = node.store.caller.troubles.values()
            return any("ExpiredToken" in trouble.reason for trouble in troubles)

        async with node.running():
            await node.write("large", os.urandom(8 * MIB) * 6)
            with trio.fail_after(20):
                while not has_expired():  # noqa: ASYNC110 (nothing tells)
                    await trio.sleep(0.01)
            await trio.sleep(0.3)
            assert not any(trouble.permanent for trouble in node.store.caller.troubles.values())
            credentials_file(new)
            await finished(node, store)
        node.close()

    run(main)
    sent = [request.query["partNumber"] for request in proxy.seen("upload_part", status=200)]
    assert sorted(sent) == ["1", "2", "3", "4", "5", "6"]
    assert proxy.count("create_multipart_upload") == 1
