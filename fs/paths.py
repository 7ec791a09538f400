"""The keys of files by their place in the namespace: directories' paths, kept in memory.

What it keeps true: a key is the path as the index has it now. Who moves a directory says so (`moved`).
"""

from __future__ import annotations

from fs.index import Index
from fs.objects import key_part
from fs.types import ROOT_INO

KEPT = 1 << 16


class Paths:
    """Keys of inodes in *index*."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._prefixes: dict[int, str] = {}

    def moved(self) -> None:
        """A directory has another place: every path may be another."""
        self._prefixes.clear()

    def prefix(self, directory: int) -> str | None:
        """What keys in a directory begin with: "" for the root, else ending in "/"; None: it has no name."""
        if directory == ROOT_INO:
            return ""
        known = self._prefixes.get(directory)
        if known is not None:
            return known
        names = self._index.names(directory)
        if not names:
            return None
        above = self.prefix(names[0][0])
        if above is None:
            return None
        if len(self._prefixes) >= KEPT:
            self._prefixes.clear()
        prefix = self._prefixes[directory] = f"{above}{key_part(names[0][1])}/"
        return prefix

    def key(self, parent: int, name: bytes) -> str | None:
        """The key of a name in a directory; of a directory's own marker, add "/"."""
        prefix = self.prefix(parent)
        return None if prefix is None else prefix + key_part(name)

    def keys(self, ino: int) -> list[str]:
        """The keys of all names of a file."""
        found = (self.key(parent, name) for parent, name in self._index.names(ino))
        return [key for key in found if key is not None]
