"""The durable side of a worker, put together: journal, writeback, reading back, and what answers commands.

What it keeps true: without a durable tier none of it exists, and a mount is as it was. An arena whose files lie in a
tier is not served without that tier.
"""

from __future__ import annotations

import logging
from typing import Any

import trio

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog, Fault, no_fault
from fs.content import Content
from fs.discovery import DiscoveringCatalog
from fs.durable import Durable
from fs.index import Index
from fs.journal import Journal
from fs.ledger import Ledger
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.reconcile import adopt, reconcile
from fs.recorder import Recorder
from fs.residence import Residence
from fs.retry import Caller
from fs.schedule import Schedule
from fs.store import Sizes, Store
from fs.tiers.opening import open_tier
from fs.tiers.options import S3Options
from fs.tiers.points import PointsTier
from fs.tiers.tier import Tier, TierError, TierRefused
from fs.verify import Verifier
from fs.vfs import Vfs
from fs.writeback import Writeback
from mount.durable_commands import DurableCommands

log = logging.getLogger("ckptfs.tier")

CALLS_AT_ONCE = 8


def _check(tier: Tier) -> None:
    """Refuse a mount on a tier that cannot be used; one that is away for now may come back."""
    try:
        tier.check()
    except TierRefused:
        raise
    except TierError as error:
        log.warning("the durable tier is away, and is asked again: %s", error)


class NodeDurable:
    """Everything that a worker with a durable tier has besides. *fault* is for tests of crashes.

    Raises CkptfsError: a tier that cannot be used, or not the one that the arena's files lie in.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        index: Index,
        arena: Arena,
        content: Content,
        fault: Fault,
        *,
        fresh: bool,
    ) -> None:
        tier = open_tier(settings["url"], S3Options(**settings["s3"]))
        if fresh:
            _check(tier)
        index.index_names()
        adopt(index, tier.describe())
        if fault is not no_fault:
            tier = PointsTier(tier, fault)
        objects, paths = ObjectTable(index), Paths(index)
        journal = Journal(index, objects, paths, arena.now_ns)
        self._known = (index, objects, paths, tier, journal)
        self.recorder = Recorder(index, journal, objects, paths, arena, tier.limits.max_key_bytes)
        self.store = Store(
            index,
            arena,
            content,
            objects,
            paths,
            journal,
            Ledger(index),
            tier,
            Caller(trio.CapacityLimiter(CALLS_AT_ONCE)),
            fault,
            Sizes(),
        )
        self.writeback = Writeback(self.store, Schedule(self.store))
        self.facade = Durable(self.store, self.writeback)
        self.residence = Residence(
            index,
            arena,
            content,
            objects,
            paths,
            tier,
            keeps=journal.keeps,
            is_clean=journal.is_clean,
            fault=fault,
        )

    def catalog(self, inner: EmbeddedCatalog) -> DiscoveringCatalog:
        """The namespace, with what the tier held before."""
        self.discovering = DiscoveringCatalog(inner, *self._known)
        self.discovering.begin()
        return self.discovering

    def attach(self, vfs: Vfs) -> DurableCommands:
        """Go on from what the index says, once the vfs has recovered: what answers the durable side's commands."""
        self.store.freed = vfs.unpinned
        self.store.stored = self.residence.evictor.wake
        self.store.holds = self.residence.fetcher.holds
        reconcile(self.store)
        vfs.virtual_xattrs.attach(self.facade, self.store.paths.keys, self.writeback.poke)
        verifier = Verifier(
            self.store.index,
            self.store.arena,
            self.store.content,
            self.store.objects,
            self.store.tier,
            state_of=self.facade.state_of,
            is_clean=self.store.journal.is_clean,
        )
        return DurableCommands(
            vfs, self.facade, self.residence.fetcher, self.residence.evictor, verifier
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Begin to move bytes."""
        await nursery.start(self.residence.run)
        nursery.start_soon(self.writeback.run)
        nursery.start_soon(self.discovering.ahead)
