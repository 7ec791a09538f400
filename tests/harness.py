"""Real mounts for tests, and the promise that none is left behind.

Every mount started here lives under one base directory named after the test process, so whatever a test, the filesystem
or the test process itself does, the mount can be found again and taken apart: by `Mount.close`, by the guard thread
when a test hangs inside the kernel (a hung FUSE request can be ended only by ending its daemon), and by the next test
run when this one was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parent.parent
LANES = ("passthrough", "plain")
LANE_ARGS = {"passthrough": ("--require-passthrough",), "plain": ("--force-plain",)}
BASE_PREFIX = "cfs-"
MNT_DETACH = 2
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)
_live: list[Mount] = []
_session_base: Path | None = None
_counter = 0


def session_base() -> Path:
    """The directory under which all mounts of this process lie; short, since socket paths end at 108 bytes."""
    global _session_base
    if _session_base is None:
        _session_base = Path(tempfile.mkdtemp(prefix=f"{BASE_PREFIX}{os.getpid()}-"))
        # Tests act as other users below it; only the private state inside is closed to them.
        _session_base.chmod(0o755)
    return _session_base


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def why_no_fuse() -> str | None:
    """A reason why nothing can be mounted here, or None."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse is missing"
    if os.geteuid() != 0:
        return "mounting needs root"
    return None


def why_no_passthrough() -> str | None:
    """A reason why the kernel would refuse passthrough here, or None."""
    if (reason := why_no_fuse()) is not None:
        return reason
    release = os.uname().release
    numbers = release.split("-")[0].split(".")
    if tuple(int(n) for n in numbers[:2]) < (6, 9):
        return f"passthrough needs Linux 6.9, this is {release}"
    return None


def mounts_under(base: Path) -> list[tuple[str, str]]:
    """(mountpoint, type) of everything mounted at or below `base`, in the order of mounting."""
    found = []
    for line in Path("/proc/self/mounts").read_bytes().splitlines():
        fields = line.split(b" ")
        point = os.fsdecode(fields[1].decode("unicode_escape").encode("latin-1"))
        if point == str(base) or point.startswith(f"{base}/"):
            found.append((point, fields[2].decode()))
    return found


def detach(mountpoint: str) -> None:
    """Lazily unmount; quiet when nothing is mounted there."""
    _libc.umount2(os.fsencode(mountpoint), MNT_DETACH)


def mount_tmpfs(target: Path, options: str = "size=4g,mode=755,huge=within_size") -> None:
    """A private tmpfs to compare with. nosuid and nodev, as the filesystem under test is.

    With the same huge pages as the arena, since those decide how exactly holes are told.
    """
    ms_nosuid, ms_nodev = 2, 4
    target.mkdir(parents=True, exist_ok=True)
    args = (b"tmpfs", os.fsencode(target), b"tmpfs", ms_nosuid | ms_nodev, options.encode())
    if _libc.mount(*args) != 0:
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err), str(target))


def pids_carrying(text: str) -> list[int]:
    """Processes other than this one whose command line or environment carries `text` (a private path of ours)."""
    needle = os.fsencode(text)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        for name in ("cmdline", "environ"):
            try:
                if needle in Path(f"/proc/{entry}/{name}").read_bytes():
                    found.append(int(entry))
                    break
            except OSError:
                continue
    return found


def kill_pid(pid: int, sig: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def pid_alive(pid: int) -> bool:
    """False for a zombie too: nothing runs in it any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Any, timeout_s: float, what: str, interval_s: float = 0.02) -> Any:
    """The first true value of `condition()`; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(interval_s)


class Mount:
    """One `ckptfs mount` with private state of its own."""

    def __init__(self, base: Path, path: Path, lane: str, name: str, env: Mapping[str, str]):
        self.base = base
        self.path = path
        self.run_dir = base / "run"
        self.lane = lane
        self.name = name
        self.env = {
            **os.environ,
            "PYTHONPATH": str(REPO_ROOT),
            **env,
            "CKPTFS_RUN_DIR": str(self.run_dir),
        }
        self.closed = False
        self.first_pids: list[int] = []

    @classmethod
    def start(
        cls,
        tmp: Path | None = None,
        size: str = "1GiB",
        lane: str = "passthrough",
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Mount:
        """Mount and return when the filesystem answers.

        The mountpoint is made inside `tmp`, or beside the private state when `tmp` is None (there other users can
        reach it; pytest's own temporary directories are closed to them).

        Raises AssertionError carrying the command's output when it fails.
        """
        mount = cls.prepare(tmp, lane, env)
        try:
            mount.mount(size=size, extra_args=extra_args)
        except BaseException:
            mount.close()
            raise
        return mount

    @classmethod
    def prepare(
        cls,
        tmp: Path | None = None,
        lane: str = "passthrough",
        env: Mapping[str, str] | None = None,
    ) -> Mount:
        """Everything but the mount itself, for tests of the `mount` command."""
        global _counter
        _counter += 1
        base = session_base() / str(_counter)
        base.mkdir(mode=0o755)
        path = base / "mnt" if tmp is None else Path(tempfile.mkdtemp(prefix="mnt-", dir=tmp))
        path.mkdir(exist_ok=True)
        mount = cls(base, path, lane, f"t{_counter}", env or {})
        _live.append(mount)
        return mount

    def mount(self, size: str = "1GiB", extra_args: Sequence[str] = ()) -> None:
        """Run `ckptfs mount`; also brings the mount back after `kill_supervisor`."""
        args = ("--size", size, "--name", self.name, *LANE_ARGS[self.lane], *extra_args)
        self.cli("mount", str(self.path), *args, timeout=START_TIMEOUT_S)
        assert os.path.ismount(self.path), (
            f"mount succeeded but {self.path} is no mountpoint\n{self.log()}"
        )
        status = self.status()
        pids = [status.get(f"{who}_pid") for who in ("supervisor", "worker")]
        self.first_pids = [pid for pid in pids if pid]

    def cli(
        self, *args: str, check: bool = True, timeout: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run `ckptfs ARGS`. Output goes through files: a daemon that kept a pipe open must not hang the test."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                code = subprocess.run(
                    [sys.executable, "-m", "mount.cli", *args],
                    env=self.env,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
                err.write(f"\n(no end within {timeout} s)".encode())
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        done = subprocess.CompletedProcess(list(args), code, *texts)
        if check and code != 0:
            command = " ".join(args)
            raise AssertionError(
                f"`ckptfs {command}` exited {code}\n{texts[0]}\n{texts[1]}\n--- log\n{self.log()}"
            )
        return done

    def status(self) -> dict[str, Any]:
        """What `ckptfs status --json` says of this mount."""
        status = json.loads(self.cli("status", str(self.path), "--json").stdout)
        assert isinstance(status, dict)
        return status

    def log(self, last_bytes: int = 6000) -> str:
        """The end of the mount's log, for failure messages."""
        try:
            return (self.run_dir / self.name / "log").read_text(errors="replace")[-last_bytes:]
        except OSError as exc:
            return f"(no log: {exc})"

    def state(self) -> dict[str, Any]:
        """What the supervisor says of itself; far cheaper than the command."""
        state = json.loads((self.run_dir / self.name / "state.json").read_text())
        assert isinstance(state, dict)
        return state

    @property
    def worker_pid(self) -> int:
        return int(wait_until(lambda: self.state()["worker_pid"], 20, "a worker"))

    @property
    def supervisor_pid(self) -> int:
        return int(self.state()["supervisor_pid"])

    def kill_worker(self) -> int:
        """SIGKILL the worker; returns its pid. Does not wait for the next one (see `wait_new_worker`)."""
        pid = self.worker_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_new_worker(self, old_pid: int, timeout: float = 15) -> int:
        """The pid of the worker that follows `old_pid`, once the filesystem answers again."""
        os.statvfs(self.path)
        return int(
            wait_until(
                lambda: (pid := self.state()["worker_pid"]) and pid != old_pid and pid,
                timeout,
                f"a worker after {old_pid}",
            )
        )

    def kill_supervisor(self) -> int:
        """SIGKILL the supervisor, wait until it is gone; returns its pid."""
        pid = self.supervisor_pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not pid_alive(pid), 10, f"the end of supervisor {pid}")
        return pid

    def umount(self, discard: bool = True) -> None:
        """`ckptfs umount`; fails when the mount is busy. The arena is kept unless `discard`."""
        self.cli("umount", str(self.path), *(("--discard",) if discard else ()))

    def answers(self) -> bool:
        """Whether the mount is there and serves requests."""
        try:
            os.statvfs(self.path)
        except OSError:
            return False
        return os.path.ismount(self.path)

    def abort(self) -> None:
        """End the daemons, and with them every request that hangs in the kernel. For the guard thread."""
        detach(str(self.path))
        for pid in {*self.first_pids, *self.pids()}:
            kill_pid(pid)

    def pids(self) -> list[int]:
        """Processes of this mount, found by the private directory they carry, not by name."""
        return pids_carrying(str(self.run_dir))

    def close(self) -> None:
        """Take everything apart, whatever state it is in, within CLOSE_TIMEOUT_S."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if mounts_under(self.path) or self.pids():
            self.cli("umount", str(self.path), "--force", "--discard", check=False, timeout=15)
        _take_apart(self.base, self.path, deadline)
        if self in _live:
            _live.remove(self)


def _take_apart(base: Path, mountpoint: Path | None, deadline: float) -> None:
    """Detach mounts, kill processes by pid and remove files of one base directory."""
    places = [base] if mountpoint is None else [mountpoint, base]
    while True:
        mounts = [point for place in places for point, _ in mounts_under(place)]
        pids = pids_carrying(str(base / "run"))
        if not mounts and not pids:
            break
        for point in reversed(mounts):
            detach(point)
        for pid in pids:
            kill_pid(pid)
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: mounts {mounts}, processes {pids}")
        time.sleep(0.02)
    shutil.rmtree(base, ignore_errors=True)
    if mountpoint is not None and mountpoint.exists():
        mountpoint.rmdir()


def abort_all() -> None:
    """For the guard thread: free whoever hangs in any mount of this process."""
    for mount in _live.copy():
        mount.abort()


def close_all() -> list[str]:
    """Close what is still mounted; returns what had been left."""
    left = [f"{mount.name} at {mount.path}" for mount in _live.copy()]
    for mount in _live.copy():
        mount.close()
    if _session_base is not None:
        left += [point for point, _ in mounts_under(_session_base)]
        _take_apart(_session_base, None, time.monotonic() + CLOSE_TIMEOUT_S)
    return left


def close_stale() -> None:
    """Take apart what a killed test run left: base directories whose process is gone."""
    for base in Path(tempfile.gettempdir()).glob(f"{BASE_PREFIX}*-*"):
        pid = base.name.removeprefix(BASE_PREFIX).split("-")[0]
        if pid.isdigit() and not pid_alive(int(pid)) and base.stat().st_uid == os.geteuid():
            for number in [*base.glob("*"), base]:
                _take_apart(number, None, time.monotonic() + CLOSE_TIMEOUT_S)


class Guard:
    """Frees a test that hangs inside the kernel.

    A process waiting for a FUSE answer takes no signal but SIGKILL, so a timeout raised by signal never arrives in it.
    The guard's thread ends the daemons instead; the waiting call returns ENOTCONN and the test fails.
    """

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mount-guard", daemon=True).start()

    def set(self, timeout_s: float | None) -> None:
        """Start a countdown, or stop it with None."""
        with self._changed:
            self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None
            print("\nguard: test hangs, ending the daemons of its mounts", file=sys.__stderr__)
            abort_all()
