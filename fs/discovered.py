"""What the objects of a durable tier are as files: entries of a directory, and their attributes. Pure.

What it keeps true:
- A listing tells names, sizes and times, and nothing else: what a file is (its mode and owner, whether it is a symlink)
  is known only after its object's metadata have been asked for.
- Objects that others put there are files too. What cannot be a name (empty, ".", "..", NUL, above 255 bytes, or a key
  that its own name would not lead back to) is no file; it is told, never guessed.
- What metadata claim is taken only where the filesystem can represent it.
"""

from __future__ import annotations

import stat
from typing import NamedTuple

from fs.objects import FILE, SYMLINK, is_usable_part, key_part, name_of_part, parse_metadata
from fs.tiers.tier import ListedObject, ObjectInfo, Page
from fs.types import SYMLINK_MAX_BYTES, Attr

FILE_MODE, DIRECTORY_MODE = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755
MAX_ID = (1 << 32) - 2  # the one above means "leave it alone"
MAX_GENERATION = (
    1 << 48
)  # far above what a file lives to see; a number to count on from must be left
NO_ETAG = ""  # of a directory that has no object of its own


class Owner(NamedTuple):
    """Who owns what has no owner in its metadata."""

    uid: int
    gid: int


class Entry(NamedTuple):
    """One name of a listing. Of a directory *key* ends in "/", and the rest is not known."""

    name: bytes
    key: str
    size: int = 0
    etag: str = NO_ETAG
    modified_ns: int = 0

    @property
    def is_directory(self) -> bool:
        """Whether there is something below it."""
        return self.key.endswith("/")


class Contents(NamedTuple):
    """A page of a directory. *marker*: the directory's own object. *unusable*: keys that cannot be names."""

    entries: list[Entry]
    marker: ListedObject | None
    unusable: list[str]


def contents_of(prefix: str, page: Page) -> Contents:
    """What a page of the listing of *prefix* ("" or ending in "/") holds. Directories come behind all files."""
    found = Contents([], next((o for o in page.objects if o.key == prefix), None), [])
    entries, unusable = found.entries, found.unusable
    for listed in page.objects:
        part = listed.key[len(prefix) :]
        if not part and prefix:
            continue
        if _is_name(part):
            entries.append(Entry(name_of_part(part), *listed))
        else:
            unusable.append(listed.key)
    for deeper in page.prefixes:
        part = deeper[len(prefix) : -1]
        if _is_name(part):
            entries.append(Entry(name_of_part(part), deeper))
        else:
            unusable.append(deeper)
    return found


def _is_name(part: str) -> bool:
    if "/" in part or not is_usable_part(part):
        return False
    return key_part(name_of_part(part)) == part


def last_key(page: Page) -> str:
    """How far a page comes, in the order of keys; "" for an empty one."""
    keys = [found.key for found in page.objects[-1:]] + page.prefixes[-1:]
    return max(keys, default="")


def listed_attr(entry: Entry, owner: Owner, now_ns: int) -> Attr:
    """What is shown of an entry as long as nothing but its listing is known."""
    uid, gid = owner
    if entry.is_directory:
        return Attr(0, DIRECTORY_MODE, 2, uid, gid, 0, 0, 0, now_ns, now_ns, now_ns, 0)
    at_ns = entry.modified_ns
    return Attr(0, FILE_MODE, 1, uid, gid, 0, entry.size, 0, at_ns, at_ns, at_ns, 1, 0)


def told_attr(before: Attr, info: ObjectInfo, target: bytes | None) -> Attr:
    """The attributes of what was listed as *before*, by its object's metadata. *target*: it is a symlink."""
    meta = parse_metadata(info.meta, info.size)
    at_ns = info.modified_ns if meta.mtime_ns is None else meta.mtime_ns
    attr = before._replace(
        uid=before.uid if meta.uid is None or meta.uid > MAX_ID else meta.uid,
        gid=before.gid if meta.gid is None or meta.gid > MAX_ID else meta.gid,
        atime_ns=at_ns,
        mtime_ns=at_ns,
        ctime_ns=at_ns,
    )
    permissions = stat.S_IMODE(before.mode) if meta.mode is None else meta.mode
    if stat.S_ISDIR(before.mode):
        return attr._replace(mode=stat.S_IFDIR | permissions)
    generation = meta.generation or 0
    if target is not None:
        known = generation if generation < MAX_GENERATION else 0
        mode, size = stat.S_IFLNK | 0o777, len(target)
        return attr._replace(mode=mode, size=size, generation=known, resident=1)
    return attr._replace(
        # bits of a symlink, whose target is none, say nothing about a file
        mode=stat.S_IFREG | (permissions if meta.kind in (None, FILE) else 0o644),
        size=info.size,
        generation=generation if 0 < generation < MAX_GENERATION else 1,
    )


def claims_symlink(info: ObjectInfo) -> bool:
    """Whether an object says that it is a symlink, and is short enough for one."""
    kind = parse_metadata(info.meta, info.size).kind
    return kind == SYMLINK and 0 < info.size <= SYMLINK_MAX_BYTES


def target_in_meta(info: ObjectInfo) -> bytes | None:
    """The target of an object that claims to be a symlink, if its metadata tell it."""
    target = parse_metadata(info.meta, info.size).target
    return target if target is not None and len(target) == info.size else None


def is_target(data: bytes) -> bool:
    """Whether this can be a symlink's target."""
    return 0 < len(data) <= SYMLINK_MAX_BYTES and b"\0" not in data
