"""Error classes. One that carries an errno reaches the application as that errno; any other is a bug
(EIO, logged) at the FUSE boundary, or one line on the terminal at the command line."""

from __future__ import annotations

import errno
import os


class CkptfsError(Exception):
    """Something a person must be told: what happened, to which path, what to do."""


class IndexDamaged(CkptfsError):
    """The index cannot be trusted (damaged, foreign, or of another version). Nothing was changed."""


class FsError(OSError):
    """A filesystem operation's regular failure; ``errno`` is what the application sees."""

    def __init__(self, code: int, what: str = "") -> None:
        super().__init__(code, what or os.strerror(code))


def not_found(what: str = "") -> FsError:
    """ENOENT."""
    return FsError(errno.ENOENT, what)


def exists(what: str = "") -> FsError:
    """EEXIST."""
    return FsError(errno.EEXIST, what)
