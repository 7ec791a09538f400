"""The directories a bench works in, made for it and gone after it, whatever happens in between.

What it keeps true: nothing is left behind: not after Ctrl-C, and what a killed bench left is
removed by the next one (directories carry the pid of their bench). The yardstick filesystem is a
process of ours, ended by its pid within a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fs.errors import CkptfsError
from mount import sysmount

PREFIX = ".ckptfs-bench-"
START_S = 20.0
STOP_S = 10.0


class Target(msgspec.Struct, frozen=True):
    """A directory to measure. *data*: sequential I/O; *metadata*: operations on names."""

    label: str
    path: Path
    data: bool = True
    metadata: bool = True


@contextlib.contextmanager
def directory_in(parent: Path) -> Iterator[Path]:
    """A fresh directory in *parent*, removed with what is in it. Raises CkptfsError."""
    _remove_stale(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    except OSError as error:
        raise CkptfsError(f"{parent}: cannot measure there: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)


def _remove_stale(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            match = re.match(re.escape(PREFIX) + r"(\d+)-", path.name)
            ours = path.stat().st_uid == os.getuid()
            if match and ours and not Path(f"/proc/{match[1]}").exists():
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def baseline() -> Iterator[Path]:
    """The bare pyfuse3 filesystem, mounted. Raises CkptfsError when it does not start."""
    mountpoint = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-pyfuse3-"))
    ours = str(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "mount.baseline_fs", str(mountpoint)],
            cwd=ours,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to handle, in order
        )
        try:
            if not _mounted(process, mountpoint):
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise CkptfsError(f"the pyfuse3 yardstick did not start: {text}")
            yield mountpoint
        finally:
            _stop(process, mountpoint)


def _mounted(process: subprocess.Popen[bytes], mountpoint: Path) -> bool:
    deadline_s = time.monotonic() + START_S
    while sysmount.mount_at(str(mountpoint)) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    os.statvfs(mountpoint)  # answered when it serves
    return True


def _stop(process: subprocess.Popen[bytes], mountpoint: Path) -> None:
    deadline_s = time.monotonic() + STOP_S
    while sysmount.mount_at(str(mountpoint)) is not None:
        late = time.monotonic() > deadline_s
        with contextlib.suppress(OSError):
            _umount(mountpoint, lazy=late)
        if late:
            break
        time.sleep(0.02)
    try:
        process.wait(max(0.1, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(OSError):
        mountpoint.rmdir()


def _umount(mountpoint: Path, *, lazy: bool) -> None:
    if os.getuid() == 0:
        sysmount.umount(str(mountpoint), sysmount.MNT_DETACH if lazy else 0)
        return
    flags = ["-u", "-z"] if lazy else ["-u"]
    subprocess.run(
        ["fusermount3", *flags, "--", str(mountpoint)], stderr=subprocess.DEVNULL, check=False
    )
