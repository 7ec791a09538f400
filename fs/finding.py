"""Asking a durable tier about names, pages of directories and attributes, and making rows of what it says.

What it keeps true:
- An answer counts only where nothing is known by then: rows that came or went while the tier was being asked stay as
  they are.
- A listing is gone on with where it was left, by whoever wants the next page; the worker's death begins it anew.
- A page of a listing is merged as it comes. What the rest of the listing may still find to be a directory is asked for
  as a name, not as an object.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import trio

from fs.asking import Asker, Denied, Flights, all_of
from fs.discovered import (
    Entry,
    claims_symlink,
    contents_of,
    is_target,
    last_key,
    target_in_meta,
)
from fs.index import Index
from fs.objects import key_bytes
from fs.paths import Paths
from fs.tiers.tier import ObjectInfo, Page, Tier, TierBadBytes, TierObjectMissing
from fs.types import SYMLINK_MAX_BYTES
from fs.undiscovered import ROWS_AT_ONCE, Undiscovered

log = logging.getLogger("ckptfs.discovery")

PROBES_ALONE = 16  # lookups of a directory before each one also reads a page of its listing
ABSENT_KEPT = 1 << 16

Place = tuple[int, bytes]
Call = Callable[[], Awaitable[None]]


class Finder:
    """Fills *rows* from *tier*. Errors are FsError EIO (Denied: the tier refuses), and ENOSPC for a full index."""

    def __init__(
        self, index: Index, paths: Paths, tier: Tier, rows: Undiscovered, asker: Asker
    ) -> None:
        self._index = index
        self._paths = paths
        self._tier = tier
        self._rows = rows
        self._asker = asker
        self._flights = Flights()
        self.removals = Removals()
        self._absent: OrderedDict[Place, None] = OrderedDict()
        self._probes: Counter[int] = Counter()
        # of directories that are being listed: where to go on, and the key that the listing has come to
        self._reached: dict[int, tuple[str, str]] = {}
        self._told: set[int] = set()  # directories of which unusable keys were logged

    def is_absent(self, parent: int, name: bytes) -> bool:
        """Whether an unlisted directory does not have a name, because that was asked or decided here."""
        if (parent, name) in self._absent:
            self._absent.move_to_end((parent, name))
            return True
        key = self._paths.key(parent, name)
        if key is None or key_bytes(key) > self._tier.limits.max_key_bytes:
            return True
        return self._rows.is_decided(key)

    async def name(self, parent: int, name: bytes) -> None:
        """Ask for one name of a directory that is not listed. Afterwards look again."""
        await self._flights.join(("probe", parent, name), partial(self._probe, parent, name))

    async def page(self, ino: int) -> None:
        """Read the next page of a directory that is not listed. Afterwards look again."""
        await self._flights.join(("page", ino), partial(self._read_page, ino))

    async def names(self, inos: Iterable[int]) -> None:
        """List directories to their end."""

        async def all_pages(ino: int) -> None:
            while self._rows.is_unlisted(ino):
                await self.page(ino)

        await self._side_by_side(partial(all_pages, ino) for ino in inos)

    async def attributes(self, inos: Iterable[int], *, denied: set[int] | None = None) -> None:
        """Ask for the metadata of inodes. Those that the tier refuses to tell are added to *denied* if it is given."""

        async def one(ino: int) -> None:
            try:
                await self._flights.join(("head", ino), partial(self._head, ino))
            except Denied:
                if denied is None:
                    raise
                denied.add(ino)

        await self._side_by_side(partial(one, ino) for ino in inos)

    async def _side_by_side(self, calls: Iterable[Call]) -> None:
        wanted = list(calls)
        await all_of(wanted, min(len(wanted), self._asker.concurrency))

    # a page of a directory

    async def _read_page(self, ino: int) -> None:
        prefix = self._paths.prefix(ino)
        if prefix is None:
            self._rows.complete(ino)
            return
        token = self._reached[ino][0] if ino in self._reached else None
        with self.removals.asking() as since:
            page = await self._list(prefix, token)
            if token is None and contents_of(prefix, page).marker is None:
                self._rows.has_no_object(ino)
            await self._take_page(ino, prefix, page, since)

    async def _list(self, prefix: str, token: str | None) -> Page:
        return await self._asker.ask(
            "listing", prefix, lambda: self._tier.list(prefix, token=token)
        )

    async def _take_page(self, ino: int, prefix: str, page: Page, since: int) -> None:
        """Make the names of a page that has just come."""
        contents = contents_of(prefix, page)
        self._tell_unusable(ino, prefix, contents.unusable)
        entries = contents.entries

        def skip(name: bytes) -> bool:
            return (ino, name) in self._absent or self.removals.has(ino, name, since)

        for start in range(0, len(entries), ROWS_AT_ONCE):
            if start:
                await trio.lowlevel.checkpoint()
            if not self._rows.is_unlisted(ino):
                return
            hidden = self._rows.insert(ino, entries[start : start + ROWS_AT_ONCE], skip)
            self._tell_hidden(hidden)
        if page.next_token is not None:
            reached = max(last_key(page), self._reached.get(ino, ("", ""))[1])
            self._reached[ino] = page.next_token, reached
            return
        self._rows.complete(ino)
        self._reached.pop(ino, None)
        self._probes.pop(ino, None)

    def _tell_unusable(self, ino: int, prefix: str, keys: list[str]) -> None:
        if keys and ino not in self._told:
            self._told.add(ino)
            log.warning(
                "%s: keys whose last part cannot be a file's name are left out, for example %r",
                self._tier.url(prefix),
                keys[0],
            )

    def _tell_hidden(self, entries: list[Entry]) -> None:
        for entry in entries:
            key = entry.key.rstrip("/")
            log.warning(
                "%s: there is an object of this name and others below it: the directory is shown",
                self._tier.url(key),
            )

    # one name

    async def _probe(self, parent: int, name: bytes) -> None:
        """Ask for one name of a directory that is not listed."""
        key = self._paths.key(parent, name)
        if key is None:
            return
        found: list[tuple[ObjectInfo | None, bytes | None]] = []
        pages: list[Page] = []

        async def ask_object() -> None:
            found.append(await self._ask_object(key))

        async def ask_below() -> None:
            longest = self._tier.limits.max_key_bytes
            below = key_bytes(key) + 1 < longest
            pages.append(await self._list(key + "/", None) if below else Page([], [], None))

        calls: list[Call] = [ask_object, ask_below]
        self._probes[parent] += 1
        if self._probes[parent] > PROBES_ALONE:
            calls.append(partial(self.page, parent))
        with self.removals.asking() as since:
            await all_of(calls, len(calls))
            info, target = found[0]
            await self._take_probe(parent, name, info, target, pages[0], since)

    async def _take_probe(
        self,
        parent: int,
        name: bytes,
        info: ObjectInfo | None,
        target: bytes | None,
        page: Page,
        since: int,
    ) -> None:
        if not self._rows.is_unlisted(parent) or self.removals.has(parent, name, since):
            return
        key = self._paths.key(parent, name)
        known = self._index.lookup(parent, name)
        if key is None or (known is not None and not self._rows.is_unheaded(known.ino)):
            return
        if page.objects or page.prefixes:
            await self._take_directory(parent, Entry(name, key + "/"), page, since)
            if info is not None:
                self._tell_hidden([Entry(name, key)])
        elif info is not None:
            entry = Entry(name, key, info.size, info.etag, info.modified_ns)
            self._rows.insert(parent, [entry], lambda _: False)
            attr = self._index.lookup(parent, name)
            if attr is not None:
                self._rows.told(attr.ino, info, target)
        elif known is None:
            self._note_absent((parent, name))
        else:
            self._rows.has_no_object(known.ino)

    async def _take_directory(self, parent: int, entry: Entry, page: Page, since: int) -> None:
        """A directory and the first page of what is in it."""
        self._rows.insert(parent, [entry], lambda _: False)
        made = self._index.lookup(parent, entry.name)
        if made is None:
            return
        contents = contents_of(entry.key, page)
        if contents.marker is None:
            self._rows.has_no_object(made.ino)
        await self._take_page(made.ino, entry.key, page, since)

    def _note_absent(self, place: Place) -> None:
        self._absent[place] = None
        if len(self._absent) > ABSENT_KEPT:
            self._absent.popitem(last=False)

    # attributes

    async def _head(self, ino: int) -> None:
        found = self._rows.object_of(ino)
        if found is None:
            self._rows.has_no_object(ino)
            return
        place = self._unsettled(ino, found.key)
        if place is not None:
            await self.name(*place)
            return
        info, target = await self._ask_object(found.key)
        if info is None:
            self._rows.has_no_object(ino)
        else:
            self._rows.told(ino, info, target)

    def _unsettled(self, ino: int, key: str) -> Place | None:
        """The place of what a listing under way may still find to be a directory."""
        if key.endswith("/"):
            return None
        for parent, name in self._index.names(ino):
            _, reached = self._reached.get(parent, ("", ""))
            if self._rows.is_unlisted(parent) and key + "/" > reached:
                return parent, name
        return None

    async def _ask_object(self, key: str) -> tuple[ObjectInfo | None, bytes | None]:
        """What the tier knows of an object (None: there is none), and its target if it is a symlink."""
        try:
            info = await self._asker.ask("asking for", key, lambda: self._tier.head(key))
            if not claims_symlink(info):
                return info, None
            target = target_in_meta(info)
            if target is None:
                target, info = await self._asker.ask(
                    "reading", key, lambda: self._tier.read(key, SYMLINK_MAX_BYTES)
                )
        except TierObjectMissing:
            return None, None
        except TierBadBytes:
            return info, None
        return info, target if target is not None and is_target(target) else None


class Removals:
    """Names that were removed while the tier was being asked: its answer may be from before."""

    def __init__(self) -> None:
        self._clock = 0
        self._asking = 0
        self._at: dict[Place, int] = {}

    @contextmanager
    def asking(self) -> Iterator[int]:
        """The tier is asked within; the time at which that began, for `has`."""
        self._asking += 1
        try:
            yield self._clock
        finally:
            self._asking -= 1
            if not self._asking:
                self._at.clear()

    def note(self, parent: int, name: bytes) -> None:
        """A name was removed, or moved away."""
        if self._asking:
            self._clock += 1
            self._at[parent, name] = self._clock

    def has(self, parent: int, name: bytes, since: int) -> bool:
        """Whether a name was removed after that time."""
        return self._at.get((parent, name), 0) > since
