"""How much RAM this process may use: what the node has, or what a cgroup above it allows, if that is less.

What it keeps true: an arena is only sized by memory that can really be had. tmpfs pages are charged to the
cgroup of whoever touches them first, and a cgroup at its limit kills a process in it, so every cgroup from
ours up to the root counts, of version 1 and of version 2. Standard library only; parsers take text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

NO_LIMIT_BYTES = 1 << 60  # version 1 says "no limit" with a number near 2**63
_OCTAL = ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\"))


class CgroupMount(NamedTuple):
    """Where a hierarchy that can limit memory is mounted; *root* is the cgroup that is visible there."""

    version: int
    root: str
    mountpoint: str


class CgroupLimit(NamedTuple):
    """A cgroup above this process that limits its memory."""

    path: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int

    @property
    def free_bytes(self) -> int:
        """What may still be touched before the limit (page cache gives way)."""
        return max(0, self.limit_bytes - self.used_bytes + self.reclaimable_bytes)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo, in bytes (entries without a unit: as they are)."""
    values = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def parse_cgroups(text: str) -> dict[int, str]:
    """/proc/PID/cgroup: the path in the hierarchy that limits memory, by version (1, 2)."""
    paths = {}
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def parse_cgroup_mounts(text: str) -> list[CgroupMount]:
    """/proc/PID/mountinfo: where those hierarchies are mounted."""
    found = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, rest = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        root, mountpoint = _unescaped(fields[3]), _unescaped(fields[4])
        if rest[0] == "cgroup2":
            found.append(CgroupMount(2, root, mountpoint))
        elif rest[0] == "cgroup" and "memory" in rest[2].split(","):
            found.append(CgroupMount(1, root, mountpoint))
    return found


def _unescaped(field: str) -> str:
    for code, character in _OCTAL:
        field = field.replace(code, character)
    return field


def cgroup_directories(cgroups: dict[int, str], mounts: list[CgroupMount]) -> list[tuple[int, str]]:
    """Every visible cgroup of a process, innermost first: (version, directory)."""
    found: list[tuple[int, str]] = []
    for mount in mounts:
        path = cgroups.get(mount.version)
        if path is None:
            continue
        relative = os.path.relpath(path, mount.root)
        # in a container the mount shows our own cgroup as its root, whatever the path says
        names = [] if relative.startswith("..") or relative == "." else relative.split("/")
        while True:
            found.append((mount.version, "/".join([mount.mountpoint.rstrip("/"), *names])))
            if not names:
                break
            names.pop()
    return found


def parse_limit(text: str) -> int | None:
    """A limit in bytes; None for "max", and for version 1's "no limit"."""
    word = text.strip()
    if not word.isdigit() or int(word) >= NO_LIMIT_BYTES:
        return None
    return int(word)


def parse_reclaimable(text: str, version: int) -> int:
    """memory.stat: page cache that gives way (tmpfs pages are not among it), in bytes."""
    prefix = "total_" if version == 1 else ""
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    lines = (line.split() for line in text.splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in wanted)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _limit_of(version: int, directory: str) -> CgroupLimit | None:
    # above memory.high writers are slowed down until they stand still: no arena wants to go there
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = [parse_limit(_read(f"{directory}/{name}")) for name in names]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
    used = parse_limit(_read(f"{directory}/{usage}")) or 0
    reclaimable = parse_reclaimable(_read(f"{directory}/memory.stat"), version)
    return CgroupLimit(directory, min(known), used, reclaimable)


def cgroup_limits() -> list[CgroupLimit]:
    """Every cgroup above this process that limits its memory."""
    cgroups = parse_cgroups(_read("/proc/self/cgroup"))
    mounts = parse_cgroup_mounts(_read("/proc/self/mountinfo"))
    limits = (_limit_of(*where) for where in cgroup_directories(cgroups, mounts))
    return [limit for limit in limits if limit is not None]


def meminfo() -> dict[str, int]:
    """This node's memory, in bytes by the names of /proc/meminfo. Raises OSError without /proc."""
    return parse_meminfo(Path("/proc/meminfo").read_text())


def memory_limit_bytes() -> int:
    """The most this process could ever use: RAM, or the smallest cgroup limit above it."""
    return min([meminfo()["MemTotal"], *(limit.limit_bytes for limit in cgroup_limits())])


def available_bytes() -> int:
    """What could be used now without swapping or reaching a cgroup's limit."""
    return min([meminfo()["MemAvailable"], *(limit.free_bytes for limit in cgroup_limits())])
