"""A node that writes back to S3 (tests.durable_node), and its bucket as anybody sees it, beside the proxy."""

from __future__ import annotations

import trio

from fs.store import Sizes
from tests.durable_node import DurableNode
from tests.s3.store import MIB, Store

# S3 takes no smaller parts than 5 MiB, but the last.
SIZES = Sizes(part_bytes=8 * MIB, single_put_bytes=1 * MIB, uploads=3)


async def drained(node: DurableNode, timeout_s: float = 40.0) -> None:
    """Return when nothing is left to do; failures are tried again at once."""
    with trio.fail_after(timeout_s):
        while node.journal.trees():
            node.writeback.hurry()
            await trio.sleep(0.02)


async def finished(node: DurableNode, store: Store) -> None:
    """Drained, and the bucket is the tree."""
    await drained(node)
    await node.tidied()
    assert store.objects() == await node.tree()
    assert store.uploads() == []
    assert node.store.caller.troubles == {}
