"""Inodes without links: when their bytes go, and when their rows go.

What it keeps true:
- The bytes of a file without links or opens are given back at once. Only of the last few small ones they
  are kept until the next sweep: a request whose path led there may be on its way, and the kernel walks a
  path twice, not three times, so a small file that is replaced over and over must not be gone each time.
- Rows go later and in bulk, in one transaction for many; meanwhile an fstat of an O_PATH descriptor or of
  a removed working directory finds its attributes.
- What is still to be uploaded (*keeps*) is not freed.
- Whatever a dead worker left is found again; what a request has made or freed that was executed and not
  yet answered is kept for its answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from fs.catalog import Fault
from fs.content import Content
from fs.errors import FsError
from fs.index import Index
from fs.types import BLOCK_BYTES

log = logging.getLogger(__name__)

ROWS_KEPT = 256
LINGERING_KEPT = 16
LINGERING_BYTES = 64 << 10  # of one file; together too little to miss


class Unlinked:
    """What is to be freed, of the files that *index* and *content* know."""

    def __init__(
        self, index: Index, content: Content, fault: Fault, keeps: Callable[[int], bool]
    ) -> None:
        self._index = index
        self._content = content
        self._arena = content.arena
        self._fault = fault
        self._keeps = keeps
        self._rows: list[int] = []
        self._lingering: deque[int] = deque()

    def recover(self) -> None:
        """Free what nobody has open and no request is still to be told about."""
        unlinked = {
            ino
            for ino in set(self._index.unlinked_inodes()) - self._content.open_inodes()
            if not self._keeps(ino)
        }
        self._rows = sorted(unlinked & self._index.recent_inodes())
        self._purge(sorted(unlinked.difference(self._rows)))

    def has_bytes(self, ino: int) -> bool:
        """Whether the bytes of an inode without links are still there."""
        return self._content.is_open(ino) or ino in self._lingering

    def add(self, ino: int) -> None:
        """Its last link and its last open are gone."""
        if ino in self._rows:
            return
        self._fault("free:before")
        self._let_go(ino)
        self._rows.append(ino)
        if len(self._rows) > ROWS_KEPT:
            self.sweep()

    def _let_go(self, ino: int) -> None:
        try:
            small = self._arena.stat(ino).st_blocks * BLOCK_BYTES <= LINGERING_BYTES
        except FileNotFoundError:
            return
        if not small:
            self._arena.remove(ino)
            return
        self._lingering.append(ino)
        if len(self._lingering) > LINGERING_KEPT:
            oldest = self._lingering.popleft()
            if not self._content.is_open(oldest):
                self._arena.remove(oldest)

    def sweep(self) -> None:
        """Forget the rows of inodes that are gone, and their last bytes."""
        self._lingering.clear()
        rows, self._rows = self._rows, []
        try:
            self._purge([ino for ino in rows if not self._content.is_open(ino)])
        except FsError as error:  # the index is full; who unlinks must not be the one to suffer
            log.warning("rows of %d removed files stay for now: %s", len(rows), error)
            self._rows = rows

    def _purge(self, inos: list[int]) -> None:
        if not inos:
            return
        for ino in inos:
            self._arena.remove(ino)
        with self._index.transaction():
            self._index.delete_inodes(inos)
