"""Files and directories of a directory tier: opened, sealed, put in place, taken away.

What it keeps true:
- A file appears whole: it is sealed (time, record, owner, mode, synced) under a hidden name and renamed into place.
- A directory counts as an object when it was stored as one. Others come and go with what is in them.
- One name is a file or a directory, never both, and which of the two is in the way is said.
- Nothing is done below another directory than the one that was there at first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
import time

from fs.objects import ObjectMeta, is_usable_part, key_part, name_of_part, parse_metadata
from fs.tiers.dirmeta import HIDDEN, Record, Records
from fs.tiers.dirparts import sync_directory
from fs.tiers.tier import Meta, TierError, TierObjectMissing, TierRefused

PATH_MAX_BYTES = 4095
PLACING_TRIES = 10
STALE_S = 24 * 3600.0
# Will not pass by themselves. All other errors of a disk may: full, I/O error, stale handle, timeout.
_REFUSED = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
)


class Files:
    """Below *root*, which has to exist. All raise OSError, TierRefused, and what they say."""

    def __init__(self, root: bytes, records: Records) -> None:
        self.hidden = os.path.join(root, HIDDEN.encode())
        self.temporary = os.path.join(self.hidden, b"tmp")
        self._root = root
        self._records = records
        self._lock = threading.Lock()  # making and removing of directories
        self._ino: int | None = None

    def path(self, key: str) -> bytes:
        """Where *key* lies, if it does. Raises TierRefused for what is no path, or not one of the tier's."""
        parts = key.rstrip("/").split("/") if key != "/" else []
        for part in parts:
            if not is_usable_part(part) or key_part(name_of_part(part)) != part:
                raise TierRefused(f"{part!r} cannot be the name of a file")
        if parts and parts[0] == HIDDEN:
            raise TierRefused(f"{HIDDEN} is the tier's own")
        path = os.path.join(self._root, *(name_of_part(part) for part in parts))
        if len(path) > PATH_MAX_BYTES:
            raise TierRefused("the path is too long")
        return path

    def check_root(self) -> None:
        """Raise TierRefused unless the root is there, and the one that was there at first."""
        try:
            ino = os.stat(self._root).st_ino
        except (FileNotFoundError, NotADirectoryError) as error:
            raise TierRefused(
                f"there is no directory {os.fsdecode(self._root)}: create it, or mount its disk"
            ) from error
        except OSError as error:
            raise os_error(error, f"asking for {os.fsdecode(self._root)}") from error
        if self._ino is None:
            self._ino = ino
        if self._ino != ino:
            raise TierRefused(
                f"{os.fsdecode(self._root)} is another directory than at first: is its disk still mounted?"
                " (if it has been replaced on purpose, mount ckptfs again)"
            )

    def open(self, key: str) -> tuple[int, os.stat_result, Record | None]:
        """(descriptor, status, record) of an object. Raises TierObjectMissing."""
        directory = key.endswith("/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        missing = TierObjectMissing("there is no such object")
        try:
            fd = os.open(self.path(key), flags | (os.O_DIRECTORY if directory else 0))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise missing from error
            raise
        try:
            found = os.fstat(fd)
            record = self._records.load(fd, key, found)
            if (record is None) if directory else not stat.S_ISREG(found.st_mode):
                raise missing
        except BaseException:
            os.close(fd)
            raise
        return fd, found, record

    def new_file(self) -> tuple[int, bytes]:
        """(descriptor, path) of a new file under a hidden name."""
        self.make_hidden()
        path = os.path.join(self.temporary, secrets.token_hex(16).encode())
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def make_hidden(self) -> None:
        """Make the hidden directories, one by one: the root itself is never made."""
        for path in (self.hidden, self.temporary):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)

    def seal(self, fd: int, key: str, meta: Meta, etag: str) -> None:
        """Give a file its time, record, owner and mode, and sync it; it is not in place yet."""
        size = os.fstat(fd).st_size
        known = parse_metadata(dict(meta), size)
        if known.mtime_ns is not None:
            os.utime(fd, ns=(known.mtime_ns, known.mtime_ns))
        mtime_ns = os.fstat(fd).st_mtime_ns  # as the disk stores it
        self._records.save(fd, key, Record(etag, dict(meta), size, (mtime_ns,)))
        _own(fd, known, stat.S_IRUSR)
        os.fsync(fd)

    def seal_again(self, fd: int, key: str, meta: Meta, etag: str) -> None:
        """Give other metadata to a file that is in place. At each moment it has the old or the new ones."""
        found = os.fstat(fd)
        known = parse_metadata(dict(meta), found.st_size)
        mtime_ns = found.st_mtime_ns if known.mtime_ns is None else known.mtime_ns
        os.fchmod(fd, stat.S_IMODE(found.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        both = Record(etag, dict(meta), found.st_size, (found.st_mtime_ns, mtime_ns))
        self._records.save(fd, key, both)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        stored_ns = os.fstat(fd).st_mtime_ns
        self._records.save(fd, key, both._replace(mtimes_ns=(stored_ns,)))
        for old_ns in {found.st_mtime_ns, mtime_ns} - {stored_ns}:
            self._records.forget(key, found.st_size, old_ns)
        _own(fd, known, stat.S_IRUSR)
        os.fsync(fd)

    def place(self, fd: int, temporary: bytes, key: str, meta: Meta) -> str:
        """Seal a file and rename it into place: its ETag."""
        path = self.path(key)
        etag = secrets.token_hex(16)
        self.seal(fd, key, meta, etag)
        sealed = os.fstat(fd)
        for tries_left in reversed(range(PLACING_TRIES)):
            try:
                with self._lock:
                    self._make_parents(key)
                    before = _status(path)
                    if before is not None and stat.S_ISDIR(before.st_mode):
                        self._make_way(path, key, before)
                    os.replace(temporary, path)
                break
            except FileNotFoundError:  # somebody else has removed a parent meanwhile
                if not tries_left:
                    raise
        if before is not None and _version(before) != _version(sealed):
            self._records.forget(key, *_version(before))
        sync_directory(os.path.dirname(path))
        return etag

    def _make_way(self, path: bytes, key: str, found: os.stat_result) -> None:
        """Remove an empty directory that is no object; refuse any other."""
        if self._records.load(path, key + "/", found) is None:
            with contextlib.suppress(OSError):
                os.rmdir(path)
                return
        raise TierRefused(
            f"there is the directory {key}/ already, and one name cannot be both;"
            " remove one of the two"
        )

    # directories

    def put_directory(self, key: str, size: int, meta: Meta) -> str:
        """Make a directory that counts, or give it other metadata: its ETag."""
        if size:
            raise TierRefused("a directory has no bytes of its own")
        known = parse_metadata(dict(meta), 0)
        path = self.path(key)
        etag = secrets.token_hex(16)
        with self._lock:
            self._make_parents(key)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRWXU)
                self._records.save(fd, key, Record(etag, dict(meta)))
                _own(fd, known, stat.S_IRWXU)
                os.fsync(fd)
            finally:
                os.close(fd)
        return etag

    def _make_parents(self, key: str) -> None:
        """Make the directories that lead to *key*, and *key* itself when it is one."""
        path = self._root
        parts = key.split("/")[:-1]
        for count, part in enumerate(parts, 1):
            parent, path = path, os.path.join(path, name_of_part(part))
            found = _status(path)
            if found is None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o755)
                sync_directory(parent)
            elif not stat.S_ISDIR(found.st_mode):
                shorter = "/".join(parts[:count])
                raise TierRefused(
                    f"{shorter} is there and no directory, and one name cannot be both;"
                    " remove one of the two"
                )

    def _prune(self, path: bytes) -> None:
        """Remove directories upwards from *path* that are empty and no objects."""
        while path != self._root:
            key = "/".join(key_part(part) for part in path[len(self._root) + 1 :].split(b"/")) + "/"
            try:
                if self._records.load(path, key, os.lstat(path)) is not None:
                    break
                os.rmdir(path)
            except OSError:
                break
            path = os.path.dirname(path)
        sync_directory(path)

    def delete(self, key: str) -> None:
        """Remove an object, and the directories that held nothing else. One that is gone is no error."""
        path = self.path(key)
        with self._lock:
            try:
                found = os.lstat(path)
                record = self._records.load(path, key, found)
            except (FileNotFoundError, NotADirectoryError):
                return
            if key.endswith("/"):
                if not stat.S_ISDIR(found.st_mode) or record is None:
                    return
                self._records.forget(key)
                self._records.strip(path)
                self._prune(path)
            elif stat.S_ISREG(found.st_mode):
                os.unlink(path)
                self._records.forget(key, *_version(found))
                self._prune(os.path.dirname(path))

    def sweep(self) -> None:
        """Remove temporary files that no running call can have."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.temporary) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_ctime < time.time() - STALE_S:
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)


def os_error(error: OSError, at: str) -> TierError:
    """The tier's error for one of the disk's. *at*: what was done to which object."""
    kind = TierRefused if error.errno in _REFUSED else TierError
    return kind(f"{at}: {error.strerror or error}")


def _status(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _version(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _own(fd: int, known: ObjectMeta, needed: int) -> None:
    """Give a file its owner and mode. *needed*: mode bits without which the tier could not use it."""
    if known.uid is not None and known.gid is not None:
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.fchown(fd, known.uid, known.gid)
    if known.mode is not None:
        with contextlib.suppress(PermissionError):  # a filesystem without modes
            os.fchmod(fd, (known.mode & 0o777) | needed)  # set-user-id is not for copies
