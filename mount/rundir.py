"""Where a mount keeps its private state, and what is known of a mount from outside its processes.

    <base>/<name>/   mode 0700
      arena/         tmpfs (or a plain directory): data/<ino>
      index/         tmpfs (or a plain directory): index.sqlite
      lock           held by the supervisor as long as it lives
      control.sock state.json log size

What it keeps true: the lock says whether a supervisor lives, whatever files say; state.json is only
believed while the lock is held.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from fs.errors import CkptfsError
from mount import sysmount
from mount.fusedev import source_of

State = Literal["mounted", "dead", "unmounted"]


class NoSuchMount(CkptfsError):
    """There is no ckptfs mount where one was named (exit status 3)."""


class SupervisorState(msgspec.Struct):
    """state.json, as the supervisor writes it."""

    name: str
    mountpoint: str
    arena: str
    lane: str
    supervisor_pid: int
    worker_pid: int | None
    standby_pid: int | None
    worker_restarts: int


def base_dir() -> Path:
    """The directory of all private state of this user."""
    if configured := os.environ.get("CKPTFS_RUN_DIR"):
        return Path(configured)
    if os.getuid() == 0:
        return Path("/run/ckptfs")
    return Path(f"/dev/shm/ckptfs-{os.getuid()}")


def default_name(mountpoint: str) -> str:
    """A name from the path: "/mnt/ckpt" is "mnt-ckpt"."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", mountpoint.strip("/").replace("/", "-"))[:64] or "root"


class RunDir:
    """The state of the mount called *name*."""

    def __init__(self, name: str, base: Path | None = None) -> None:
        self.name = name
        self.path = (base or base_dir()) / name
        self.arena = self.path / "arena"
        self.index = self.path / "index"
        self.log = self.path / "log"
        self.control = self.path / "control.sock"
        self.mountpoint_file = self.path / "mountpoint"

    def make(self) -> None:
        """Create it, for the owner only. Refuses one that belongs to somebody else."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        for path in (self.path.parent, self.path):
            status = path.stat()
            if status.st_uid != os.getuid():
                raise CkptfsError(
                    f"{path} belongs to uid {status.st_uid}, not to you: set CKPTFS_RUN_DIR"
                )
        self.path.chmod(0o700)
        for path in (self.arena, self.index):
            path.mkdir(mode=0o700, exist_ok=True)

    def lock(self) -> int | None:
        """Take the lock: its descriptor (inheritable), or None while a supervisor lives."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def is_live(self) -> bool:
        """Whether a supervisor lives."""
        if not (self.path / "lock").exists():
            return False
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    def supervisor(self) -> SupervisorState | None:
        """What the living supervisor says of itself."""
        if not self.is_live():
            return None
        try:
            return msgspec.json.decode(
                (self.path / "state.json").read_bytes(), type=SupervisorState
            )
        except (OSError, msgspec.DecodeError):
            return None

    def has_data(self) -> bool:
        """Whether an arena is kept here."""
        return (self.index / "index.sqlite").exists()

    def mountpoint(self) -> str:
        """Where it is, or was last, mounted."""
        try:
            return self.mountpoint_file.read_text()
        except OSError:
            return ""

    def state(self) -> State:
        """Whether it serves, has lost its supervisor, or is only kept."""
        if self.is_live():
            return "mounted"
        target = self.mountpoint()
        entry = sysmount.mount_at(target) if target else None
        dead = entry is not None and entry.source == source_of(self.name)
        return "dead" if dead else "unmounted"


def all_run_dirs() -> list[RunDir]:
    """Every mount of this user that has state."""
    base = base_dir()
    if not base.is_dir():
        return []
    names = sorted(path.name for path in base.iterdir() if (path / "lock").exists())
    return [RunDir(name) for name in names]


def find(mountpoint: str) -> RunDir:
    """The mount at a mountpoint (or by its name, or last mounted there). Raises NoSuchMount."""
    target = os.path.realpath(mountpoint) if not sysmount.is_dead(mountpoint) else mountpoint
    target = os.path.abspath(target)
    entry = sysmount.mount_at(target)
    if (
        entry is not None
        and entry.kind == sysmount.FUSE_TYPE
        and entry.source.startswith("ckptfs:")
    ):
        return _ours(entry)
    for run in all_run_dirs():
        if mountpoint == run.name or run.mountpoint() == target:
            return run
    raise NoSuchMount(f"{mountpoint}: no ckptfs is mounted there; `ckptfs status` lists what is")


def find_by_path(path: str) -> tuple[RunDir, str]:
    """The mount that *path* lies in, and the path relative to it. Raises NoSuchMount."""
    real = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
    real = os.path.normpath(real)
    best: sysmount.MountEntry | None = None
    for entry in sysmount.mounts():
        inside = real == entry.target or real.startswith(entry.target.rstrip("/") + "/")
        if inside and (best is None or len(entry.target) >= len(best.target)):
            best = entry
    if best is None or best.kind != sysmount.FUSE_TYPE:
        raise NoSuchMount(f"{path}: not on a ckptfs mount")
    return _ours(best), os.path.relpath(real, best.target)


def _ours(entry: sysmount.MountEntry) -> RunDir:
    run = RunDir(entry.source.removeprefix("ckptfs:"))
    try:
        known = run.path.exists()
    except PermissionError:
        known = False
    if not known and not sysmount.is_dead(entry.target):
        raise CkptfsError(
            f"{entry.target}: mounted by another user, or with another CKPTFS_RUN_DIR; ask as that user"
        )
    return run
