"""The extended attributes user.ckptfs.*: what a program may ask of a file, and the one thing it may say.

    user.ckptfs.state       read only: writing, local, uploading, held, skipped, durable, remote (fs.durable)
    user.ckptfs.generation  read only: the number of the version of its bytes
    user.ckptfs.digest      read only: XXH3-128 of that version in hex; ENODATA while it is not known
    user.ckptfs.persist     "always" or "never": policy is overridden for this file, or for all below this directory;
                            "now": what it (or all below) holds is to be made durable at once

What it keeps true:
- What is read only is of regular files (elsewhere ENODATA), is never listed, so that nothing copies it, and cannot be
  set or removed (EPERM). So is every other name that begins with "user.ckptfs.".
- user.ckptfs.persist is kept as any attribute is: listed, copied, removable, there after a crash. "now" is an order and
  is not kept. Any other value is EINVAL.
- Without a durable tier nothing would follow from it, so it cannot be set (EOPNOTSUPP); one that was set earlier can be
  read and removed.
- The nearest override wins: of the file itself, else of the directory that is the fewest steps above it. Of several
  names of a file, one that is always kept is enough.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import Literal, Protocol, cast

from fs.content import Content
from fs.errors import FsError
from fs.index import Index
from fs.types import ROOT_INO, Attr

PREFIX = b"user.ckptfs."
STATE, GENERATION, DIGEST = PREFIX + b"state", PREFIX + b"generation", PREFIX + b"digest"
PERSIST = PREFIX + b"persist"
READ_ONLY = (STATE, GENERATION, DIGEST)
NOW = b"now"

Override = Literal["always", "never"]
_OVERRIDES: dict[bytes, Override] = {b"always": "always", b"never": "never"}


class Known(Protocol):
    """What is asked of the durable side (fs.durable.Durable)."""

    def state_of(self, attr: Attr) -> str: ...

    def digest_of(self, attr: Attr) -> str | None: ...

    def persist(self, prefix: str) -> int: ...


class VirtualXattrs:
    """For the vfs. *durable* is None where there is no durable tier (until `attach`)."""

    def __init__(self, index: Index, content: Content) -> None:
        self._index = index
        self._content = content
        self._overrides: dict[int, Override] | None = None
        self.durable: Known | None = None
        self._keys_of: Callable[[int], list[str]] = lambda ino: []
        self._changed: Callable[[], None] = lambda: None

    def attach(
        self, durable: Known, keys_of: Callable[[int], list[str]], changed: Callable[[], None]
    ) -> None:
        """There is a durable tier. *keys_of*: an inode's names. *changed*: an override was set or removed."""
        self.durable = durable
        self._keys_of = keys_of
        self._changed = changed

    # reading

    def state_of(self, attr: Attr) -> str:
        """One word, or "" for what has no bytes of its own."""
        if self.durable is not None:
            return self.durable.state_of(attr)
        if not stat.S_ISREG(attr.mode):
            return ""
        return "writing" if self._content.has_writers(attr.ino) else "local"

    def get(self, attr: Attr, name: bytes) -> bytes | None:
        """The value of a read-only attribute; None: it is kept as others are. Raises FsError ENODATA."""
        if name not in READ_ONLY:
            return None
        text: str | None = None
        if stat.S_ISREG(attr.mode):
            if name == STATE:
                text = self.state_of(attr)
            elif name == GENERATION:
                text = str(attr.generation)
            elif self.durable is not None and not self._content.has_writers(attr.ino):
                text = self.durable.digest_of(attr)
        if not text:
            raise FsError(errno.ENODATA)
        return text.encode()

    # writing

    def setting(self, attr: Attr, name: bytes, value: bytes) -> bool:
        """Before a value is set: whether it is to be kept. Raises FsError EPERM, EINVAL, EOPNOTSUPP."""
        if not name.startswith(PREFIX):
            return True
        self.removing(name)
        value = value.rstrip(b"\n\0")
        if value != NOW and value not in _OVERRIDES:
            raise FsError(errno.EINVAL, "user.ckptfs.persist is always, never or now")
        if self.durable is None:
            raise FsError(errno.EOPNOTSUPP, "this mount has no durable tier")
        if value != NOW:
            return True
        for key in [""] if attr.ino == ROOT_INO else self._keys_of(attr.ino):
            self.durable.persist(key)
        return False

    def removing(self, name: bytes) -> None:
        """Before an attribute is removed. Raises FsError EPERM."""
        if name.startswith(PREFIX) and name != PERSIST:
            raise FsError(
                errno.EPERM, "what begins with user.ckptfs. tells of a file; it is not set"
            )

    def was_changed(self, ino: int, name: bytes, value: bytes | None) -> None:
        """After an attribute was set, or removed (None)."""
        if name != PERSIST:
            return
        overrides = self._all()
        known = None if value is None else _OVERRIDES.get(value.rstrip(b"\n\0"))
        if known is None:
            overrides.pop(ino, None)
        else:
            overrides[ino] = known
        self._changed()

    # what follows from it

    def override_for(self, ino: int) -> Override | None:
        """What a person has said about a file: the nearest override, of it or of a directory above it."""
        overrides = self._all()
        if not overrides:
            return None
        own = overrides.get(ino)
        if own is not None:
            return own
        found = {self._inherited(parent, overrides) for parent, _ in self._index.names(ino)}
        if "always" in found:
            return "always"
        return "never" if "never" in found else None

    def _inherited(self, directory: int, overrides: dict[int, Override]) -> Override | None:
        while True:
            found = overrides.get(directory)
            if found is not None or directory == ROOT_INO:
                return found
            directory = self._index.parent(directory)

    def _all(self) -> dict[int, Override]:
        # inode numbers are never given twice: what is left of one that is gone means nothing
        if self._overrides is None:
            rows = self._index.db.execute("SELECT ino,value FROM xattr WHERE name=?", (PERSIST,))
            kept = ((int(ino), cast(bytes, value).rstrip(b"\n\0")) for ino, value in rows)
            self._overrides = {ino: _OVERRIDES[value] for ino, value in kept if value in _OVERRIDES}
        return self._overrides
