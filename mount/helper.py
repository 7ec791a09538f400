"""mount(8)'s helper: `mount.fuse.ckptfs SOURCE MOUNTPOINT [-o OPTIONS]` as a `ckptfs mount` command line.

What it keeps true: an option that is neither ours nor one of mount(8)'s own is refused by name; the options
that every fstab line may carry and that mean nothing to us are passed over.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from fs.errors import CkptfsError

_WITH_VALUE = {"size": "--size", "name": "--name", "config": "--config"}
_FLAGS = {
    "allow_plain": "--allow-plain",
    "require_passthrough": "--require-passthrough",
    "force_plain": "--force-plain",
    "nonempty": "--nonempty",
}
# mount(8)'s own, and what our mounts always are
_PASSED_OVER = frozenset(
    [
        "rw",
        "auto",
        "noauto",
        "user",
        "nouser",
        "users",
        "defaults",
        "dev",
        "nodev",
        "suid",
        "nosuid",
        "exec",
        "noexec",
        "async",
        "atime",
        "noatime",
        "relatime",
        "_netdev",
        "nofail",
        "allow_other",
        "default_permissions",
    ]
)


def translate(arguments: list[str]) -> list[str]:
    """`ckptfs` arguments from mount(8)'s. Raises CkptfsError on an unknown option."""
    places: list[str] = []
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "-o":
            options += next(words, "").split(",")
        elif word == "-t":
            next(words, None)
        elif word in ("-n", "-s", "-v", "-f"):
            continue
        else:
            places.append(word)
    if len(places) != 2:
        raise CkptfsError("usage: mount.fuse.ckptfs SOURCE MOUNTPOINT [-o OPTIONS]")
    source, mountpoint = places
    flags = [flag for option in options if option for flag in _flag(option)]
    if source not in ("ckptfs", "none") and "--name" not in flags:
        flags += ["--name", source.removeprefix("ckptfs:")]
    return ["mount", mountpoint, *flags]


def _flag(option: str) -> list[str]:
    key, equals, value = option.partition("=")
    if equals and key in _WITH_VALUE:
        return [_WITH_VALUE[key], value]
    if key in _FLAGS:
        return [_FLAGS[key]]
    if key in _PASSED_OVER or key.startswith(("x-", "comment")):
        return []
    known = ", ".join([f"{key}=" for key in _WITH_VALUE] + list(_FLAGS))
    raise CkptfsError(f"option {option!r} is not known; known are {known}")


def install(directory: Path) -> Path:
    """Write the helper where mount(8) looks for it; it calls this very interpreter."""
    path = directory / "mount.fuse.ckptfs"
    ours = Path(__file__).resolve().parent.parent
    code = f"import sys; sys.path.insert(0, {str(ours)!r}); from mount.cli import mount_helper; mount_helper()"
    script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n'
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(script)
    fresh.chmod(0o755)
    os.replace(fresh, path)
    return path
