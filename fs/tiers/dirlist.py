"""Listing a directory tier in the order of keys, page by page.

What it keeps true: a page goes on where the last one ended, whatever has come or gone meanwhile; a token is what a key
must be greater than. Only regular files and directories count: links and devices are never followed or shown.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from fs.objects import is_usable_part, key_part, name_of_part
from fs.tiers.dirmeta import HIDDEN, Records
from fs.tiers.tier import ListedObject, Page

LAST_CHARACTER = "\U0010ffff"  # no key below a prefix is greater than the prefix and this
PAGE_SIZE = 10_000  # each page reads its directories anew
_TRIES = 3


class Listing:
    """Of the objects below *root*. Raises OSError."""

    def __init__(self, root: bytes, records: Records) -> None:
        self._root = root
        self._records = records
        self.page_size = PAGE_SIZE

    def page(self, prefix: str, *, deep: bool, token: str | None) -> Page:
        """One page. *prefix*: "" or ending in "/"."""
        objects: list[ListedObject] = []
        prefixes: list[str] = []
        last = token or ""
        for key, is_prefix in self._walk(prefix, deep, last):
            if len(objects) + len(prefixes) == self.page_size:
                return Page(objects, prefixes, last)
            if is_prefix:
                prefixes.append(key)
                last = key + LAST_CHARACTER
                continue
            found = self._object(key)
            if found is not None:
                objects.append(found)
                last = key
        return Page(objects, prefixes, None)

    def _walk(self, prefix: str, deep: bool, after: str) -> Iterator[tuple[str, bool]]:
        """(key, whether it stands for what is below it) of what may be an object, in order, greater than *after*."""
        if prefix and prefix > after:
            yield prefix, False
        waiting = [iter(self._names(prefix))]
        while waiting:
            key = next(waiting[-1], None)
            if key is None:
                waiting.pop()
            elif not key.endswith("/"):
                if key > after:
                    yield key, False
            elif key + LAST_CHARACTER > after:
                if not deep:
                    yield key, True
                    continue
                if key > after:
                    yield key, False
                waiting.append(iter(self._names(key)))

    def _names(self, prefix: str) -> list[str]:
        """Keys of what is in a directory, directories with "/", in order."""
        keys = []
        try:
            with os.scandir(self._path(prefix)) as entries:
                for entry in entries:
                    part = key_part(entry.name)
                    if not is_usable_part(part) or (not prefix and part == HIDDEN):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        keys.append(f"{prefix}{part}/")
                    elif entry.is_file(follow_symlinks=False):
                        keys.append(prefix + part)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(keys)

    def _object(self, key: str) -> ListedObject | None:
        path = self._path(key)
        try:
            found = os.lstat(path)
            for _ in range(_TRIES):
                record = self._records.load(path, key, found)
                again = os.lstat(path)
                if (again.st_ino, again.st_mtime_ns) == (found.st_ino, found.st_mtime_ns):
                    break
                found = again  # replaced between the two
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISDIR(found.st_mode) != key.endswith("/"):
            return None
        if stat.S_ISDIR(found.st_mode):
            return None if record is None else ListedObject(key, 0, record.etag, found.st_mtime_ns)
        etag = f"{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}"
        return ListedObject(
            key, found.st_size, etag if record is None else record.etag, found.st_mtime_ns
        )

    def _path(self, key: str) -> bytes:
        parts = [name_of_part(part) for part in key.split("/") if part]
        return os.path.join(self._root, *parts)
