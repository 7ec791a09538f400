"""Nodes that die when S3 has done what they asked, and nobody was told: another one finds out, and goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fs.reconcile import reconcile
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import TierError
from tests.durable_node import DurableNode, run
from tests.exchange import CHANGES, Exchange
from tests.faultproxy import FaultProxy
from tests.s3.node import SIZES, drained, finished
from tests.s3.store import MIB, Store


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
    store: Store,
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
            await finished(node, store)
        for row in node.index.regular_files():
            assert not row.nlink or node.objects.is_durable(row.ino, row.generation)
        # for the next one
        async with node.running():
            for path in sorted(await node.tree(), reverse=True):
                await (node.rmdir(path[:-1]) if path.endswith("/") else node.unlink(path))
            await finished(node, store)
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
