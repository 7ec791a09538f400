"""Mounting and unmounting, as the command line does it: what is checked, prepared, started and kept.

What it keeps true:
- `mount` returns when the filesystem answers, or leaves everything as it found it, with one reason.
- An arena that holds files is never erased but by a discard that was asked for.
- Whatever lies at the mountpoint that is not a dead mount of ours is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fs import memory
from fs.errors import CkptfsError, IndexDamaged
from mount import fusedev, sysmount
from mount.config import Settings, parse_size
from mount.leftover import Leftover, leftover
from mount.rundir import NoSuchMount, RunDir, default_name, find

READY_S = 180.0
INDEX_SHARE = 32  # of the arena's size; tmpfs takes memory only for what is in it
INDEX_MIN_BYTES = 256 << 20
LOG_BYTES = 16 << 20


class Busy(CkptfsError):
    """The mount, or its name, is in use (exit status 4)."""


class TimedOut(CkptfsError):
    """It did not happen in time (exit status 5)."""


class NotDurable(CkptfsError):
    """Bytes would be lost that are not in the durable tier (exit status 6)."""


class Unmounted(NamedTuple):
    """What was unmounted. *left*: what its durable tier lacks; None when it has none."""

    run: RunDir
    left: Leftover | None


def mount(
    mountpoint: str,
    settings: Settings,
    *,
    foreground: bool = False,
    nonempty: bool = False,
    set_aside: bool = False,
) -> str:
    """Mount; the lane in use. With *foreground* this process becomes the supervisor.

    Raises CkptfsError (Busy when the mountpoint or the name is taken).
    """
    target = _checked_mountpoint(mountpoint, nonempty)
    run = RunDir(settings.name or default_name(target))
    _check_device()
    size_bytes = _checked_size(settings.size)
    run.make()
    lock_fd = run.lock()
    if lock_fd is None:
        raise Busy(
            f"{run.name}: already mounted on {run.mountpoint()}; choose another --name, or umount it"
        )
    try:
        if set_aside and run.has_data():
            os.close(lock_fd)
            run, lock_fd = _set_aside(run)
        return _mount_locked(run, target, settings, size_bytes, lock_fd, foreground)
    finally:
        os.close(lock_fd)


def _mount_locked(
    run: RunDir, target: str, settings: Settings, size_bytes: int, lock_fd: int, foreground: bool
) -> str:
    fresh = not run.has_data()
    try:
        private = os.getuid() == 0 and _mount_arena(run, size_bytes)
        (run.arena / "data").mkdir(mode=0o700, exist_ok=True)
        (run.arena / "clock").touch(mode=0o600)
        run.mountpoint_file.write_text(target)
        arguments = _supervisor_settings(run, target, settings, None if private else size_bytes)
        if foreground:
            os.set_inheritable(lock_fd, True)
            os.execve(sys.executable, _supervisor_argv(arguments), _environment())
        return _start(run, arguments, lock_fd)
    except (CkptfsError, OSError):
        if fresh:
            _unmount_arena(run)  # nothing was ever in it; the log stays
        raise


def _checked_mountpoint(mountpoint: str, nonempty: bool) -> str:
    absolute = os.path.abspath(mountpoint)
    fusedev.clear_dead(absolute)
    target = os.path.realpath(absolute)
    fusedev.clear_dead(target)
    if not os.path.exists(target):
        raise CkptfsError(f"{mountpoint}: no such directory; make it first: mkdir -p {mountpoint}")
    if not os.path.isdir(target):
        raise CkptfsError(f"{mountpoint}: not a directory")
    entry = sysmount.mount_at(target)
    if entry is not None and entry.kind.startswith("fuse"):
        raise Busy(
            f"{mountpoint}: {entry.source} is already mounted there; `ckptfs umount` it first"
        )
    if os.listdir(target) and not nonempty:
        raise CkptfsError(
            f"{mountpoint}: not empty, and a mount would hide what is in it; "
            "choose an empty directory, or pass --nonempty"
        )
    return target


def _check_device() -> None:
    if not os.path.exists(fusedev.DEVICE):
        raise CkptfsError(
            f"{fusedev.DEVICE} is not there: load the module (modprobe fuse), or give the container "
            "the device (docker run --device /dev/fuse)"
        )
    if not os.access(fusedev.DEVICE, os.R_OK | os.W_OK):
        raise CkptfsError(
            f"{fusedev.DEVICE}: you may not open it: mount as root, or let users (chmod 666 {fusedev.DEVICE})"
        )
    if os.getuid() != 0 and shutil.which("fusermount3") is None:
        raise CkptfsError(
            "as a user other than root, fusermount3 is needed: install the package fuse3"
        )


def _checked_size(size: str) -> int:
    limit_bytes = memory.memory_limit_bytes()
    size_bytes = parse_size(size, limit_bytes)
    if size_bytes > limit_bytes:
        raise CkptfsError(
            f"size {size} is {_gib(size_bytes)}, but this node (or its cgroup) has {_gib(limit_bytes)} "
            "of RAM: choose less, or a percentage such as --size 50%"
        )
    return size_bytes


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _set_aside(run: RunDir) -> tuple[RunDir, int]:
    aside = run.path.with_name(f"{run.name}.aside-{time.strftime('%Y%m%dT%H%M%S')}")
    run.path.rename(aside)
    fresh = RunDir(run.name)
    fresh.make()
    lock_fd = fresh.lock()
    assert lock_fd is not None
    return fresh, lock_fd


def _mount_arena(run: RunDir, size_bytes: int) -> bool:
    """Mount (or resize) the private tmpfs pair. False where tmpfs cannot be mounted."""
    index_bytes = max(INDEX_MIN_BYTES, size_bytes // INDEX_SHARE)
    try:
        _tmpfs(run.arena, size_bytes, "huge=within_size")
        _tmpfs(run.index, index_bytes, "")
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        return False
    return True


def _tmpfs(path: Path, size_bytes: int, extra: str) -> None:
    flags = sysmount.MS_NOSUID | sysmount.MS_NODEV | sysmount.MS_NOATIME
    options = f"size={size_bytes},mode=700"
    if sysmount.mount_at(str(path)) is not None:
        try:
            flags |= sysmount.MS_REMOUNT
            sysmount.mount("ckptfs-arena", str(path), "tmpfs", flags, options)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            used = shutil.disk_usage(path).used
            raise CkptfsError(
                f"the arena kept in {path} holds {_gib(used)}: choose a --size above that, "
                "or delete files first"
            ) from error
        return
    if extra:
        with contextlib.suppress(OSError):  # a kernel without huge pages for tmpfs
            sysmount.mount("ckptfs-arena", str(path), "tmpfs", flags, f"{options},{extra}")
            return
    sysmount.mount("ckptfs-arena", str(path), "tmpfs", flags, options)


def _supervisor_settings(
    run: RunDir, target: str, settings: Settings, bound_bytes: int | None
) -> dict[str, Any]:
    root = os.getuid() == 0
    worker = {
        "arena": str(run.arena),
        "index": str(run.index),
        "bound_bytes": bound_bytes,
        "passthrough": not settings.force_plain,
        "durable": {"url": settings.durable, "s3": settings.s3} if settings.durable else None,
        "faults": bool(os.environ.get("CKPTFS_FAULTS")),
        "no_resend": bool(os.environ.get("CKPTFS_NO_RESEND")),
    }
    return {
        "name": run.name,
        "run_dir": str(run.path),
        "mountpoint": target,
        "arena": str(run.arena),
        "use_fusermount": not root,
        "allow_other": _user_allow_other(),
        "require_passthrough": settings.require_passthrough,
        "hang_timeout_s": settings.hang_timeout_s,
        "give_up_s": settings.give_up_s,
        "stop_grace_s": settings.stop_grace_s,
        "ready_fd": None,
        "worker_argv": [sys.executable, "-m", "mount.daemon"],
        "worker": worker,
    }


def _user_allow_other() -> bool:
    try:
        lines = Path("/etc/fuse.conf").read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def _supervisor_argv(arguments: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "mount.supervisor", json.dumps(arguments)]


def _environment() -> dict[str, str]:
    # the processes run in "/": they must find this package wherever it was found
    ours = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": f"{ours}:{inherited}" if inherited else ours}


def _start(run: RunDir, arguments: dict[str, Any], lock_fd: int) -> str:
    ready, told = os.pipe()
    with _log_file(run) as log:
        process = subprocess.Popen(
            _supervisor_argv(arguments | {"ready_fd": told}),
            pass_fds=(told, lock_fd),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(),
        )
    os.close(told)
    os.set_blocking(ready, False)
    answer = _wait_ready(run, ready, process)
    if "error" in answer:
        raise CkptfsError(f"{arguments['mountpoint']}: not mounted: {answer['error']}")
    os.stat(arguments["mountpoint"])
    return str(answer["lane"])


def _log_file(run: RunDir) -> Any:
    with contextlib.suppress(FileNotFoundError):
        if run.log.stat().st_size > LOG_BYTES:
            run.log.rename(run.log.with_suffix(".old"))
    return open(run.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def _wait_ready(run: RunDir, ready: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline_s = time.monotonic() + READY_S
    try:
        while time.monotonic() < deadline_s:
            with contextlib.suppress(BlockingIOError):
                data = os.read(ready, 1 << 16)
                if not data:
                    return {"error": f"the supervisor ended at its start; see {run.log}"}
                return dict(json.loads(data))
            time.sleep(0.005)
    finally:
        os.close(ready)
    process.kill()
    return {"error": f"no answer within {READY_S:.0f} s; see {run.log}"}


def umount(
    mountpoint: str, *, timeout_s: float, force: bool, discard: bool, has_tier: bool = True
) -> Unmounted:
    """Unmount; wait for the supervisor's end. A dead mount is cleared; a kept arena may be discarded.

    *has_tier*: False when the mount is known to have no durable tier.
    Raises Busy (who uses it), TimedOut, NoSuchMount, NotDurable (it is unmounted, and its arena kept).
    """
    run = find(mountpoint)
    target = run.mountpoint() or os.path.abspath(mountpoint)
    os.chdir("/")  # or this process itself may be what keeps it busy
    deadline_s = time.monotonic() + timeout_s
    fusedev.clear_dead(target)
    entry = sysmount.mount_at(target)
    if entry is not None and entry.source == fusedev.source_of(run.name):
        _umount_live(target, deadline_s, force)
    while run.is_live():
        if time.monotonic() > deadline_s:
            if not force:
                raise TimedOut(
                    f"{target}: detached, but the supervisor did not end in {timeout_s:.0f} s"
                )
            _kill_supervisor(run)
        time.sleep(0.01)
    fusedev.clear_dead(target)
    left = _left(run, must_know=discard and not force) if has_tier else None
    if discard:
        if left is not None and left.unsaved and not force:
            raise NotDurable(
                f"{target}: not discarded: {len(left.unsaved)} of its changes are not in {left.tier} "
                f"(the first: {left.unsaved[0].key}); mount it again to go on uploading, or lose them "
                "with --discard --force"
            )
        discard_arena(run)
    return Unmounted(run, left)


def _left(run: RunDir, *, must_know: bool) -> Leftover | None:
    try:
        return leftover(run)
    except IndexDamaged as error:
        if must_know:
            raise NotDurable(
                f"{error}: whether everything is durable cannot be told; to erase the arena all the "
                "same: --discard --force"
            ) from error
        return None


def _umount_live(target: str, deadline_s: float, force: bool) -> None:
    while True:
        try:
            _umount_once(target, 0)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise CkptfsError(f"{target}: {error.strerror}") from error
        if force:
            _umount_once(target, sysmount.MNT_DETACH)
            return
        if time.monotonic() > deadline_s:
            raise Busy(f"{target}: in use by {users_of(target)}; end them, or pass --force")
        time.sleep(0.1)


def _umount_once(target: str, flags: int) -> None:
    if os.getuid() == 0:
        sysmount.umount(target, flags)
        return
    lazy = ["-z"] if flags else []
    command = ["fusermount3", "-u", *lazy, "--", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        code = errno.EBUSY if "busy" in done.stderr else errno.EPERM
        raise OSError(code, done.stderr.strip(), target)


def users_of(target: str) -> str:
    """The processes that have something open, mapped or as working directory below *target*."""
    users = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _uses(entry, target):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{entry}/comm").read_text().strip()
                users.append(f"{name} (pid {entry})")
    return (
        ", ".join(users[:8])
        or "something no process here shows (another namespace, a nested mount)"
    )


def _uses(pid: str, target: str) -> bool:
    links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    with contextlib.suppress(OSError):
        links += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            path = os.readlink(link)
            if path == target or path.startswith(target.rstrip("/") + "/"):
                return True
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return f" {target.rstrip('/')}/" in Path(f"/proc/{pid}/maps").read_text()
    return False


def _kill_supervisor(run: RunDir) -> None:
    state = run.supervisor()
    if state is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.supervisor_pid, signal.SIGKILL)


def discard_arena(run: RunDir) -> None:
    """Give the arena's memory back, with every file in it."""
    _unmount_arena(run)
    shutil.rmtree(run.path)


def _unmount_arena(run: RunDir) -> None:
    for path in (run.arena, run.index):
        while sysmount.mount_at(str(path)) is not None:
            sysmount.umount(str(path), sysmount.MNT_DETACH)


def restart(mountpoint: str, *, timeout_s: float) -> tuple[int | None, int | None]:
    """Let a fresh worker take over: the pids before and after. Raises TimedOut, NoSuchMount."""
    run = find(mountpoint)
    before = run.supervisor()
    if before is None:
        raise NoSuchMount(f"{mountpoint}: not mounted (no living supervisor); mount it again")
    os.kill(before.supervisor_pid, signal.SIGHUP)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        now = run.supervisor()
        if now is not None and now.worker_pid not in (None, before.worker_pid):
            return before.worker_pid, now.worker_pid
        time.sleep(0.02)
    raise TimedOut(f"{mountpoint}: no new worker within {timeout_s:.0f} s; see {run.log}")
