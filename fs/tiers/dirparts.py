"""Multipart uploads of a directory tier, below its hidden directory.

What it keeps true:
- Parts of equal size, the last one shorter, are written where they belong in one file, so that completing them writes
  nothing again. Others lie in files of their own, and are put together at the end.
- A part counts once its bytes are on the disk: its record is made after they are synced.
- What is half removed is no upload any more.

An upload is a directory: `about` (JSON), `stride` (the size of the first part that came), `data`, and one file per
part, NUMBER-SIZE-ETAG and ".here" (empty: its bytes are in `data`, at its number times the stride) or ".own".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
from typing import Any, NamedTuple

from fs.tiers.sending import Sending
from fs.tiers.tier import (
    Body,
    Meta,
    PendingUpload,
    TierRefused,
    TierUploadMissing,
    UploadedPart,
)

_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(rb"(\d{5})-(\d+)-([0-9a-f]{32})\.(here|own)")
COPY_BYTES = 64 << 20


class _Part(NamedTuple):
    size: int
    etag: str
    name: bytes
    here: bool


class Uploads:
    """The uploads in *directory* (which need not be there); *temporary* is there, beside it.

    Raises OSError, and TierUploadMissing for what is no upload.
    """

    def __init__(self, directory: bytes, temporary: bytes) -> None:
        self._directory = directory
        self._temporary = temporary
        self._lock = threading.Lock()

    def start(self, key: str, meta: Meta) -> str:
        """Begin one: its id."""
        upload_id = secrets.token_hex(16)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
        making = os.path.join(self._temporary, upload_id.encode())
        os.mkdir(making, 0o700)
        about = {"key": key, "meta": dict(meta), "started_ns": time.time_ns()}
        with open(os.path.join(making, b"about"), "w") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(making, self._path(upload_id))
        sync_directory(self._directory)
        return upload_id

    def put_part(self, key: str, upload_id: str, number: int, body: Body | bytes) -> str:
        """Store a part: its ETag."""
        upload = self._found(key, upload_id)
        if not 1 <= number <= 99_999:
            raise TierRefused(f"there is no part {number}")
        sending = Sending(body)
        size, etag = len(sending), secrets.token_hex(16)
        stride = self._stride(upload, size)
        here = 0 < size <= stride
        name = f"{number:05d}-{size}-{etag}.{'here' if here else 'own'}".encode()
        before = [part.name for found, part in _parts(upload) if found == number]
        path = os.path.join(upload, b"data" if here else b"new-" + name)
        if here:  # the bytes of an earlier try are overwritten
            for old in before:
                os.unlink(os.path.join(upload, old))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, sending, (number - 1) * stride if here else 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if here:
            os.close(os.open(os.path.join(upload, name), os.O_WRONLY | os.O_CREAT, 0o600))
        else:
            os.rename(path, os.path.join(upload, name))
            for old in before:
                os.unlink(os.path.join(upload, old))
        return etag

    def _stride(self, upload: bytes, size: int) -> int:
        path = os.path.join(upload, b"stride")
        with self._lock:
            try:
                with open(path) as file:
                    return int(file.read())
            except FileNotFoundError:
                temporary = path + b".new"
                with open(temporary, "w") as file:
                    file.write(str(size))
                os.rename(temporary, path)
                return size

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of one."""
        upload = self._found(key, upload_id)
        return sorted(UploadedPart(number, part.size, part.etag) for number, part in _parts(upload))

    def joined(self, key: str, upload_id: str, parts: list[tuple[int, str]]) -> tuple[bytes, Meta]:
        """The path of a file of these parts' bytes, not synced, and the metadata. The caller takes the file away."""
        upload = self._found(key, upload_id)
        there = dict(_parts(upload))
        chosen = [
            (number, there[number])
            for number, etag in parts
            if number in there and there[number].etag == etag
        ]
        numbers = [number for number, _ in chosen]
        if len(chosen) != len(parts) or not parts or numbers != sorted(set(numbers)):
            raise TierUploadMissing(f"not all of these parts of {key} are there, in order")
        stride = self._stride(upload, 0)
        data = os.path.join(upload, b"data")
        meta: Meta = _about(upload)["meta"]
        if _is_contiguous(chosen, stride):
            os.chmod(data, 0o600)  # an earlier try may have made it read-only
            os.truncate(data, (len(chosen) - 1) * stride + chosen[-1][1].size)
            return data, meta
        joined = os.path.join(self._temporary, secrets.token_hex(16).encode())
        target = os.open(joined, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for number, part in chosen:
                path = data if part.here else os.path.join(upload, part.name)
                source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    copy_range(source, (number - 1) * stride if part.here else 0, part.size, target)
                finally:
                    os.close(source)
        finally:
            os.close(target)
        return joined, meta

    def remove(self, key: str, upload_id: str) -> None:
        """It is over. Nothing when it is gone."""
        try:
            upload = self._found(key, upload_id)
            dead = os.path.join(self._temporary, b"dead-" + secrets.token_hex(8).encode())
            os.rename(upload, dead)
        except (TierUploadMissing, FileNotFoundError):
            return
        shutil.rmtree(dead, ignore_errors=True)

    def pending(self, prefix: str) -> list[PendingUpload]:
        """All whose keys begin with *prefix*."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            with contextlib.suppress(TierUploadMissing):
                about = _about(os.path.join(self._directory, name))
                if about["key"].startswith(prefix):
                    found.append(PendingUpload(about["key"], name.decode(), about["started_ns"]))
        return sorted(found)

    def _path(self, upload_id: str) -> bytes:
        return os.path.join(self._directory, upload_id.encode())

    def _found(self, key: str, upload_id: str) -> bytes:
        if not _ID.fullmatch(upload_id) or _about(self._path(upload_id))["key"] != key:
            raise TierUploadMissing(f"there is no upload {upload_id} of {key}")
        return self._path(upload_id)


def _about(upload: bytes) -> dict[str, Any]:
    try:
        with open(os.path.join(upload, b"about")) as file:
            about = json.load(file)
        if isinstance(about["key"], str) and isinstance(about["started_ns"], int):
            return {
                "key": about["key"],
                "started_ns": about["started_ns"],
                "meta": dict(about["meta"]),
            }
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        pass
    raise TierUploadMissing(
        f"there is no upload {os.path.basename(upload).decode(errors='replace')}"
    )


def _parts(upload: bytes) -> list[tuple[int, _Part]]:
    try:
        names = os.listdir(upload)
    except FileNotFoundError:
        raise TierUploadMissing("the upload is gone") from None
    found = []
    for name in names:
        if match := _PART.fullmatch(name):
            part = _Part(int(match[2]), match[3].decode(), name, match[4] == b"here")
            found.append((int(match[1]), part))
    return found


def _is_contiguous(chosen: list[tuple[int, _Part]], stride: int) -> bool:
    return all(
        part.here and number == expected and (part.size == stride or expected == len(chosen))
        for expected, (number, part) in enumerate(chosen, 1)
    )


def write_all(fd: int, sending: Sending, offset: int) -> None:
    """Write a body behind *fd* from *offset*. Raises OSError, TierBadBytes."""
    while piece := sending.read():
        view = memoryview(piece)
        while len(view):
            count = os.pwrite(fd, view, offset)
            offset += count
            view = view[count:]


def copy_range(source: int, offset: int, length: int, target: int) -> None:
    """Append *length* bytes behind *source* from *offset* to *target*, by the kernel. Raises OSError, EOFError."""
    end = offset + length
    while offset < end:
        want = min(COPY_BYTES, end - offset)
        try:
            count = os.copy_file_range(source, target, want, offset_src=offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            count = os.write(target, os.pread(source, min(want, 1 << 20), offset))
        if not count:
            raise EOFError(f"the file ends at {offset}, before {end}")
        offset += count


def sync_directory(path: bytes) -> None:
    """Make renames and removals in a directory last. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and others sync no directories
            raise
    finally:
        os.close(fd)
