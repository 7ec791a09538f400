"""A node's durable tier as the rest of the node sees it: what state a file is in, waiting, asking for more or less.

What it keeps true: the answers are made from the journal, the object rows and the namespace, never from what a worker
happens to remember, so they are the same after it was killed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import NamedTuple

from fs.journal import Row, State
from fs.retry import Trouble
from fs.store import Store
from fs.types import Attr
from fs.writeback import Progress, Writeback

# states of a file, as people are told them
WRITING, LOCAL, UPLOADING, HELD, SKIPPED = "writing", "local", "uploading", "held", "skipped"
DURABLE, REMOTE = "durable", "remote"


class Unsaved(NamedTuple):
    """Something that is not durable. *reason* is empty when it is only a matter of time."""

    key: str
    size: int
    since_ns: int
    state: str
    reason: str


class Durable:
    """What *writeback* and *store* know, by inode and by path."""

    def __init__(self, store: Store, writeback: Writeback) -> None:
        self.store = store
        self.writeback = writeback

    # states

    def state_of(self, attr: Attr) -> str:
        """One word; "" for what has no bytes of its own.

        writing: somebody has it open for writing. local: in memory only. uploading: on its way. held: policy lets
        it wait. skipped: policy does not want it. durable: in memory and in the tier. remote: in the tier only.
        """
        if not stat.S_ISREG(attr.mode):
            return ""
        if not attr.resident:
            return REMOTE
        if self.store.content.has_writers(attr.ino):
            return WRITING
        rows = self.store.journal.of(attr.ino)
        if not rows and self.store.objects.is_durable(attr.ino, attr.generation):
            return DURABLE
        if rows and all(row.state == State.SKIPPED for row in rows):
            return SKIPPED
        if any(self.writeback.is_uploading(row) for row in rows):
            return UPLOADING
        if rows and self.writeback.schedule.why_held(rows[0]):
            return HELD
        return LOCAL

    def digest_of(self, attr: Attr) -> str | None:
        """XXH3-128 of the current generation, in hex, if it is known."""
        digests = self.store.objects.digests(attr.ino, attr.generation)
        return None if digests is None else digests.whole.hex()

    def since_ns(self, attr: Attr) -> int | None:
        """Since when the oldest un-durable change of a file waits; None: nothing waits."""
        rows = self.store.journal.of(attr.ino)
        return min((row.at_ns for row in rows), default=None)

    # the whole

    def progress(self) -> Progress:
        """What is left to do, without what policy skips."""
        return self.writeback.progress()

    def troubles(self) -> list[Trouble]:
        """What the tier refuses or fails to do, the longest-standing first."""
        return sorted(self.store.caller.troubles.values(), key=lambda trouble: trouble.since_ns)

    def unsaved_written(self, prefix: str) -> Iterator[Unsaved]:
        """Files at or below a key that are open for writing."""
        store = self.store
        for ino in sorted(store.content.writing_inodes()):
            attr = store.index.attr(ino)
            for key in store.paths.keys(ino) if attr is not None else ():
                if attr is not None and _is_below(key, prefix):
                    size = store.content.observe(attr).size if attr.resident else attr.size
                    yield Unsaved(key, size, attr.mtime_ns, WRITING, "it is open for writing")

    def unsaved_page(self, prefix: str, after_seq: int, limit: int) -> list[tuple[int, Unsaved]]:
        """What waits at or below a key, a part at a time: (seq, to go on from behind it; what)."""
        rows = self.store.journal.page(prefix, after_seq, limit)
        return [(row.seq, self._unsaved(row)) for row in rows]

    def _unsaved(self, row: Row) -> Unsaved:
        attr = self.store.index.attr(row.ino) if row.ino else None
        size = attr.size if attr is not None and stat.S_ISREG(attr.mode) else 0
        return Unsaved(row.key, size, row.at_ns, self._row_state(row), self._reason(row))

    def _row_state(self, row: Row) -> str:
        if row.state == State.SKIPPED:
            return SKIPPED
        if self.writeback.is_uploading(row):
            return UPLOADING
        return HELD if self.writeback.schedule.why_held(row) else LOCAL

    def _reason(self, row: Row) -> str:
        trouble = self.store.caller.troubles.get(row.key)
        if trouble is not None:
            return trouble.reason
        return self.writeback.schedule.why_held(row)

    # asking for more

    def is_saved(self, prefix: str) -> bool:
        """Whether nothing at or below a key waits, other than for its writers to close it."""
        return not self.store.journal.has_below(prefix)

    def persist(self, prefix: str) -> int:
        """Upload what is at or below a key whatever policy says: how many changes that is for."""
        with self.store.index.transaction():
            count = self.store.journal.force(prefix)
        self.writeback.poke()
        return count


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(prefix.rstrip("/") + "/")
