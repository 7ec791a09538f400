"""Writeback to a real S3 that fails: nothing is lost, the bucket is a consistent cut at every instant, nobody waits.

The node runs without a mount (tests.durable_node), its requests go through the fault proxy to Ceph. What the bucket
holds is asked for beside the proxy.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fs.reconcile import reconcile
from fs.store import Sizes
from fs.tiers import s3client
from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import TierError
from tests import s3faults
from tests.durable_node import DurableNode, run
from tests.faultproxy import CHANGES, Exchange, Fault, FaultProxy, Request
from tests.rgw import Rgw, User
from tests.test_writeback import Job, check_cut

MIB = 1 << 20
# S3 takes no smaller parts than 5 MiB, but the last.
SIZES = Sizes(part_bytes=8 * MIB, single_put_bytes=1 * MIB, uploads=3)


class Bucket:
    """As anybody sees it, beside the proxy."""

    def __init__(self, rgw: Rgw) -> None:
        self.name = rgw.new_bucket()
        self.client = rgw.owner

    def keys(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [entry["Key"].removeprefix("ckpt/") for entry in listed]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=f"ckpt/{key}")["Body"].read())

    def contents(self) -> dict[str, bytes]:
        return {key: self.get(key) for key in self.keys()}

    def markers(self) -> dict[str, bytes]:
        """All keys, with the bytes of those alone that name others."""
        naming = (".metadata", "latest")
        return {key: self.get(key) if key.endswith(naming) else b"" for key in self.keys()}

    def uploads(self) -> int:
        return len(self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", []))


@pytest.fixture
def bucket(rgw: Rgw) -> Bucket:
    return Bucket(rgw)


@pytest.fixture
def make_tier(
    rgw: Rgw, proxy: FaultProxy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., S3Tier]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in rgw.credentials_env().items():
        monkeypatch.setenv(name, value)

    def make(timeout_s: float = 20.0) -> S3Tier:
        return S3Tier(
            bucket.name,
            "ckpt",
            S3Options(
                endpoint_url=proxy.url,
                region="us-east-1",
                connect_timeout_s=timeout_s,
                read_timeout_s=timeout_s,
            ),
        )

    return make


async def drained(node: DurableNode, timeout_s: float = 40.0) -> None:
    """Return when nothing is left to do; failures are tried again at once."""
    with trio.fail_after(timeout_s):
        while node.journal.trees():
            node.writeback.hurry()
            await trio.sleep(0.02)


async def finished(node: DurableNode, bucket: Bucket) -> None:
    """Drained, and the bucket is the tree."""
    await drained(node)
    await node.tidied()
    assert bucket.contents() == await node.tree()
    assert bucket.uploads() == 0
    assert node.store.caller.troubles == {}


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
    bucket: Bucket,
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
            check_cut(bucket.markers())
        except AssertionError as error:
            wrong.append(f"after {request.operation} {request.key} ({request.fault}): {error}")

    async def main() -> None:
        # answers may wait for `look`
        node = DurableNode(tmp_path, make_tier(1.0), sizes=SIZES)
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
            await finished(node, bucket)
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
    bucket: Bucket,
    fault: Fault,
) -> None:
    """Its parts would be paid for for ever. What others began under the same key stays."""
    others = bucket.client.create_multipart_upload(Bucket=bucket.name, Key="ckpt/file")["UploadId"]
    proxy.inject(s3faults.slow_down(), operation="list_multipart_uploads")
    proxy.inject(fault, operation="create_multipart_upload", times=3)

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(), sizes=SIZES)
        async with node.running():
            await node.write("file", b"f" * (2 * MIB))
            await drained(node)
            await node.tidied()
        assert bucket.contents() == await node.tree()
        node.close()

    run(main)
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [others]
    assert proxy.count("create_multipart_upload") == 4


def test_the_trouble_of_what_nobody_wants_any_more_is_over(
    tmp_path: Path, make_tier: Callable[..., S3Tier], proxy: FaultProxy, bucket: Bucket
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
            await finished(node, bucket)
        node.close()

    run(main)


class Killed(BaseException):
    """As kill -9: nothing after it runs."""


class Dying:
    """A tier whose process dies when its last request was lost."""

    def __init__(self, tier: S3Tier) -> None:
        self._tier = tier
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tier, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except TierError:
                if self.dead:
                    raise Killed from None
                raise

        return call


async def story(node: DurableNode) -> None:
    """Upload, rename before and after, rewrite, unlink."""
    await node.mkdir("d")
    await node.write("d/small", b"small")
    await node.write("d/large", b"L" * (9 * MIB))
    await drained(node)
    await node.rename("d", "e")
    await node.write("e/large", b"M" * (2 * MIB + 1))
    await node.chmod("e/small", 0o600)
    await drained(node)
    await node.unlink("e/small")
    await drained(node)


@pytest.mark.parametrize(
    "operation", [*CHANGES, "create_multipart_upload", "upload_part", "abort_multipart_upload"]
)
def test_killed_when_the_store_has_done_it_and_nobody_was_told(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    bucket: Bucket,
    operation: str,
) -> None:
    """The n-th request of a kind reaches the store, for each n; its answer does not, and the node is gone."""

    def killed(nth: int) -> bool:
        tier = Dying(make_tier())

        def do_it_and_die(exchange: Exchange) -> None:
            for _ in exchange.answer_body(exchange.forward()):
                pass
            tier.dead = True
            exchange.reset()

        rule = proxy.inject(do_it_and_die, operation=operation, nth=nth)
        directory = tmp_path / str(nth)
        node = DurableNode(directory, tier, sizes=SIZES)  # type: ignore[arg-type]

        async def main() -> None:
            async with node.running():
                await story(node)

        try:
            run(main)
        except BaseException as error:
            if not tier.dead or not _is_of(error, Killed):
                raise
        rule.remove()
        node.index.db.rollback()
        node.close()
        return tier.dead

    async def recovers(nth: int) -> None:
        node = DurableNode(tmp_path / str(nth), make_tier(), sizes=SIZES)
        node.vfs.recover([], fresh_mount=False)
        reconcile(node.store)
        async with node.running():
            await finished(node, bucket)
        for row in node.index.regular_files():
            assert not row.nlink or node.objects.is_durable(row.ino, row.generation)
        # for the next one
        async with node.running():
            for path in sorted(await node.tree(), reverse=True):
                await (node.rmdir(path[:-1]) if path.endswith("/") else node.unlink(path))
            await finished(node, bucket)
        node.close()

    nth = 1
    while killed(nth):
        run(functools.partial(recovers, nth))
        nth += 1
    assert nth > 1 or operation == "abort_multipart_upload"


def _is_of(error: BaseException, kind: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_of(inner, kind) for inner in error.exceptions)
    return isinstance(error, kind)


def test_nothing_local_waits_for_a_black_hole(
    tmp_path: Path, make_tier: Callable[..., S3Tier], proxy: FaultProxy, bucket: Bucket
) -> None:
    proxy.inject(s3faults.black_hole(), times=None)

    async def main() -> None:
        node = DurableNode(tmp_path, make_tier(1.0), sizes=SIZES)
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
            assert bucket.keys() == []
            proxy.heal()
            await finished(node, bucket)
        node.close()

    run(main)


@pytest.mark.parametrize("refusal", [s3faults.access_denied(), s3faults.no_such_bucket()])
def test_a_refusal_is_an_alarm_and_keeps_the_data(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    bucket: Bucket,
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
            await finished(node, bucket)
        node.close()

    run(main)
    alarms = [record for record in caplog.records if record.levelname == "ERROR"]
    assert any(code in alarm.getMessage() for alarm in alarms)


def test_credentials_that_expire_while_a_file_is_uploaded(
    tmp_path: Path,
    make_tier: Callable[..., S3Tier],
    proxy: FaultProxy,
    bucket: Bucket,
    rgw: Rgw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sent is not sent again."""
    file = tmp_path / "credentials"

    def write_credentials(user: User) -> None:
        new = tmp_path / "new"
        new.write_text(
            f"[default]\naws_access_key_id={user.access_key}\naws_secret_access_key={user.secret_key}\n"
        )
        new.replace(file)

    old, new = User(rgw.access_key, rgw.secret_key), rgw.second_key()
    write_credentials(old)
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.1)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def is_over(request: Request) -> bool:
        return (
            request.access_key == old.access_key and len(proxy.seen("upload_part", status=200)) >= 2
        )

    proxy.inject(s3faults.expired_token(), when=is_over, times=None)

    async def main() -> None:
        node = DurableNode(tmp_path / "node", make_tier(), sizes=SIZES)

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
            write_credentials(new)
            await finished(node, bucket)
        node.close()

    run(main)
    sent = [request.query["partNumber"] for request in proxy.seen("upload_part", status=200)]
    assert sorted(sent) == ["1", "2", "3", "4", "5", "6"]
    assert proxy.count("create_multipart_upload") == 1
