"""The namespace of a node whose durable tier held files before it was mounted: found out as it is asked for.

What it keeps true:
- Before an operation whatever it depends on has been asked of the tier; then the embedded catalog does it, without a
  wait in between, in one transaction as always. So O_EXCL, ENOTEMPTY and rename are decided as if all were known.
- What the tier does not answer in time is EIO, never "no such file".
- A lookup asks for one name, a listing for one directory; metadata are asked for a page of entries at a time, many side
  by side. Who looks up many names of a directory has it listed along the way.
- No inode is shown before its attributes are known, since the kernel believes them (the exception: in a listing, an
  object whose metadata the tier refuses to tell).
- What was renamed or removed here does not come back: the journal says what becomes of its key, and what an answer
  under way has not heard of yet is remembered until it is here.
- One node owns what is below the prefix: what the tier was asked once is believed.

The kernel takes the directory's lock for most of this; who comes in by the control socket does not.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable

import trio

from fs.asking import Asker
from fs.catalog import EmbeddedCatalog, Inserted
from fs.errors import FsError, not_found
from fs.finding import Finder, Place
from fs.index import Index
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.tiers.tier import Tier
from fs.types import ROOT_INO, Attr, DirEntry, Op
from fs.undiscovered import Pending, Undiscovered

AGAIN_S = 5.0
NAMELESS = b"/"
ENTRIES_AT_ONCE = 128  # that a reader of a directory waits for


class DiscoveringCatalog:
    """*inner*, and before each of its operations what *tier* has to say. *pending* is the journal.

    *concurrency*: calls at once; boto3 takes 1 to 3 ms of a CPU for each, so more do not help. *timeout_s*: how long a
    tier that does not answer is asked for one operation.
    """

    may_wait = True

    def __init__(
        self,
        inner: EmbeddedCatalog,
        index: Index,
        objects: ObjectTable,
        paths: Paths,
        tier: Tier,
        pending: Pending,
        *,
        concurrency: int = 16,
        timeout_s: float = 60.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.cache_timeout_s = inner.cache_timeout_s
        self._inner = inner
        self._index = index
        self._tier = tier
        self._rows = Undiscovered(index, objects, paths, pending, now_ns)
        asker = Asker(tier, concurrency=concurrency, timeout_s=timeout_s)
        self._finder = Finder(index, paths, tier, self._rows, asker)
        self._denied: set[int] = set()

    def begin(self) -> bool:
        """At the start: whether this tier was not asked before, and all is still to be found out."""
        return self._rows.begin(self._tier.describe())

    async def ahead(self) -> None:
        """List the root, so that nobody has to wait for it later."""
        while self._rows.is_unlisted(ROOT_INO):
            try:
                await self._finder.names([ROOT_INO])
            except FsError:  # logged
                await trio.sleep(AGAIN_S)

    # the catalog

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """What a name means, or None."""
        await self._known(parent, name)
        return await self._inner.lookup(parent, name)

    async def listed(self, ino: int, after_cookie: int = 0, limit: int | None = None) -> None:
        """Return when `scan` shows the *limit* entries behind a cookie (None: all), or all that are left."""
        count = -1 if limit is None else limit
        while True:
            if self._rows.is_unlisted(ino) and not self._has_settled(ino, after_cookie, limit):
                await self._finder.page(ino)
                continue
            unheaded = self._rows.unheaded_in(ino, after_cookie, count)
            unknown = [ino for ino in unheaded if ino not in self._denied]
            if not unknown:
                return
            await self._finder.attributes(unknown, denied=self._denied)

    async def entries(self, ino: int, after_cookie: int, limit: int) -> list[DirEntry]:
        """Entries behind a cookie, *limit* at most (fewer where attributes have to be asked for); none at the end."""
        if not self._rows.is_all_known and (
            self._rows.is_unlisted(ino) or self._rows.unheaded_in(ino, after_cookie, limit)
        ):
            limit = min(limit, ENTRIES_AT_ONCE)
        await self.listed(ino, after_cookie, limit)
        return self._inner.scan(ino, after_cookie, limit)

    def scan(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]:
        """Entries in cookie order, of those that are known: see `listed`."""
        return self._inner.scan(parent, after_cookie, limit)

    async def make(
        self, parent: int, name: bytes, new: Attr, target: bytes | None, inserted: Inserted, op: Op
    ) -> Attr:
        """Add a node of any kind."""
        if not name.startswith(NAMELESS) and not self._executed(op):
            await self._known(parent, name)
            self._require_alive(parent)
        return await self._inner.make(parent, name, new, target, inserted, op)

    async def link(self, ino: int, parent: int, name: bytes, now_ns: int, op: Op) -> Attr:
        """Give an inode one more name."""
        if not self._executed(op):
            await self._known(parent, name)
        return await self._inner.link(ino, parent, name, now_ns, op)

    async def unlink(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None:
        """Remove a name."""
        if not self._executed(op):
            await self._known(parent, name)
            self._before_removal(parent, name)
        done = await self._inner.unlink(parent, name, now_ns, op)
        self._finder.removals.note(parent, name)
        return done

    async def rmdir(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None:
        """Remove an empty directory."""
        if not self._executed(op):
            await self._known(parent, name, whether_empty=True)
            gone = self._index.lookup(parent, name)
            if gone is not None and self._index.is_empty(gone.ino):
                self._before_removal(parent, name)
        done = await self._inner.rmdir(parent, name, now_ns, op)
        self._finder.removals.note(parent, name)
        return done

    async def rename(
        self, source: Place, destination: Place, flags: int, now_ns: int, op: Op
    ) -> Attr | None:
        """Move a name. All that is below it is found out first: its objects move one by one."""
        if not self._executed(op):
            while not self._may_rename(source, destination):
                await self._known(*source)
                await self._known(*destination, whether_empty=True)
                await self._whole(source)
            self._before_removal(*source)
        done = await self._inner.rename(source, destination, flags, now_ns, op)
        self._finder.removals.note(*source)
        return done

    async def set_attr(self, attr: Attr) -> None:
        """Replace an inode's attributes. Raises FsError ESTALE: they were not known yet, look again."""
        if self._rows.is_unheaded(attr.ino):
            await self._finder.attributes([attr.ino])
            raise FsError(errno.ESTALE)
        await self._inner.set_attr(attr)

    async def overwriting(self, attr: Attr) -> None:
        """A file is about to be rewritten in place."""
        await self._inner.overwriting(attr)

    async def set_xattr(
        self, ino: int, name: bytes, value: bytes | None, now_ns: int, op: Op
    ) -> None:
        """Set, or with None remove, an extended attribute."""
        await self._inner.set_xattr(ino, name, value, now_ns, op)

    def _executed(self, op: Op) -> bool:
        return op.resent and self._index.recorded_op(op.op_id) is not None

    def _require_alive(self, directory: int) -> None:
        attr = self._index.attr(directory)
        if attr is None or attr.nlink == 0:
            raise not_found("the directory has been removed")

    def _before_removal(self, parent: int, name: bytes) -> None:
        if parent != ROOT_INO and self._index.lookup(parent, name) is not None:
            self._rows.keep_directory(parent)

    # what an operation depends on

    async def _known(self, parent: int, name: bytes, *, whether_empty: bool = False) -> None:
        """Return when it is known what a name means; and of a directory whether it is empty."""
        while not self._is_known(parent, name, whether_empty=whether_empty):
            attr = self._index.lookup(parent, name)
            if attr is None:
                await self._finder.name(parent, name)
            elif self._rows.is_unheaded(attr.ino):
                await self._finder.attributes([attr.ino])
            else:
                await self._finder.page(attr.ino)

    def _is_known(self, parent: int, name: bytes, *, whether_empty: bool = False) -> bool:
        if self._rows.is_all_known:
            return True
        attr = self._index.lookup(parent, name)
        if attr is None:
            return not self._rows.is_unlisted(parent) or self._finder.is_absent(parent, name)
        if self._rows.is_unheaded(attr.ino):
            return False
        return not (
            whether_empty
            and stat.S_ISDIR(attr.mode)
            and self._rows.is_unlisted(attr.ino)
            and self._index.is_empty(attr.ino)
        )

    def _may_rename(self, source: Place, destination: Place) -> bool:
        if not self._is_known(*source) or not self._is_known(*destination, whether_empty=True):
            return False
        moved = self._index.lookup(*source)
        if moved is None or not stat.S_ISDIR(moved.mode):
            return True
        rows = self._rows
        return not rows.unlisted_below(moved.ino) and not rows.unheaded_below(moved.ino)

    async def _whole(self, place: Place) -> None:
        """Find out all that is below a name."""
        top = self._index.lookup(*place)
        if top is None:
            return
        while unlisted := self._rows.unlisted_below(top.ino):
            await self._finder.names(unlisted)
        await self._finder.attributes(self._rows.unheaded_below(top.ino))

    def _has_settled(self, ino: int, after_cookie: int, limit: int | None) -> bool:
        """Whether a page of a directory is known before the rest is."""
        return limit is not None and self._rows.has_entries(ino, after_cookie, limit)
