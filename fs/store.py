"""What everything that moves bytes to or from the durable tier shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from fs.arena import Arena
from fs.catalog import Fault, no_fault
from fs.content import Content
from fs.index import Index
from fs.journal import Journal, Row
from fs.ledger import Ledger
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.retry import Caller
from fs.tiers.tier import Tier

T = TypeVar("T")
HASHERS = 2


@dataclass(frozen=True)
class Sizes:
    """How much at once. *part_bytes*: of a multipart upload, grown for files that would have too many parts."""

    part_bytes: int = 16 << 20
    single_put_bytes: int = 8 << 20
    uploads: int = 4
    window_rows: int = 32


@dataclass
class Store:
    """One node's durable side.

    *freed* is told inodes whose bytes no row needs any more, *stored* that something has become durable. *holds*:
    whether somebody still reads what lies under a key, though its file has no name any more.
    """

    index: Index
    arena: Arena
    content: Content
    objects: ObjectTable
    paths: Paths
    journal: Journal
    ledger: Ledger
    tier: Tier
    caller: Caller
    fault: Fault = no_fault
    sizes: Sizes = field(default_factory=Sizes)
    freed: Callable[[int], None] = lambda ino: None
    stored: Callable[[], None] = lambda: None
    holds: Callable[[str], bool] = lambda key: False
    hashing: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(HASHERS))

    async def call(self, row: Row, what: str, function: Callable[[], T]) -> T:
        """Ask the tier on behalf of a row, until it answers."""
        return await self.caller.call(row.key, what, function)

    def now_ns(self) -> int:
        """Wall clock, ns since the epoch."""
        return time.time_ns()
