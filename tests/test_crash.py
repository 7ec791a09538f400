"""Workers, and the supervisor, die at every kind of moment; the application sees nothing of it.

`--kills N` sets how many random kills each load test makes (the suite's default gives more than 100 in all).
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Mount, kill_pid, wait_until

LOAD = Path(__file__).with_name("load.py")
RESENDS = {"kernel": {}, "none": {"CKPTFS_NO_RESEND": "1"}}
FAULTS = {"CKPTFS_FAULTS": "1"}


class Load:
    """Processes of load.py on directories of their own."""

    def __init__(self, mount: Mount, tmp: Path, count: int) -> None:
        self.stop = tmp / "stop"
        self.processes = []
        for number in range(count):
            top = mount.path / f"load{number}"
            top.mkdir()
            command = [sys.executable, str(LOAD), str(top), str(self.stop), str(number)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.processes.append(subprocess.Popen(command, text=True, **pipes))

    def finish(self) -> int:
        """Rounds done; fails with a process's own words if one saw an error."""
        self.stop.touch()
        rounds = 0
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=60)
                assert process.returncode == 0, err
                rounds += int(out)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return rounds


def kill_and_wait(mount: Mount, settle_s: float) -> None:
    pid = mount.kill_worker()
    mount.wait_new_worker(pid)
    time.sleep(settle_s)


def wait_restarts(mount: Mount, count: int) -> None:
    """The application may go on before the supervisor has written its state."""
    wait_until(lambda: mount.state()["worker_restarts"] >= count, 5, f"{count} restarts")
    assert mount.state()["worker_restarts"] == count


@pytest.mark.timeout(300)
@pytest.mark.parametrize("resend", RESENDS)
@pytest.mark.parametrize("which_lane", ["passthrough", "plain"])
def test_killed_under_load(
    make_mount: Callable[..., Mount],
    tmp_path: Path,
    pytestconfig: pytest.Config,
    which_lane: str,
    resend: str,
) -> None:
    kills = pytestconfig.getoption("--kills")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    mount = make_mount(lane=which_lane, env=RESENDS[resend])
    load = Load(mount, tmp_path, 3)
    for _ in range(kills):
        kill_and_wait(mount, rng.random() * 0.2)
    wait_restarts(mount, kills)
    assert load.finish() > kills


@pytest.mark.timeout(120)
def test_killed_before_its_standby_is_ready(
    make_mount: Callable[..., Mount], tmp_path: Path
) -> None:
    mount = make_mount()
    load = Load(mount, tmp_path, 2)
    for _ in range(8):
        for pid in [mount.worker_pid, mount.state()["standby_pid"]]:
            if pid:
                kill_pid(pid)
        time.sleep(0.1)
    load.finish()


@pytest.mark.timeout(120)
def test_restart_command_under_load(make_mount: Callable[..., Mount], tmp_path: Path) -> None:
    mount = make_mount()
    load = Load(mount, tmp_path, 2)
    for number in range(5):
        before = mount.worker_pid
        mount.cli("restart", str(mount.path))
        assert mount.worker_pid != before
        wait_restarts(mount, number + 1)
    assert load.finish() > 5


# every change of the namespace, dying before and after its commit

Change = Callable[[Path], None]


def _create(d: Path) -> None:
    fd = os.open(d / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640)
    os.write(fd, b"bytes")
    os.close(fd)
    assert (d / "new").read_bytes() == b"bytes"
    assert (d / "new").stat().st_mode & 0o777 == 0o640


def _tmpfile(d: Path) -> None:
    fd = os.open(d, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"nameless")
    # with a src_dir_fd, or Python calls link(2), which does not follow
    os.link(f"/proc/self/fd/{fd}", d / "named", src_dir_fd=fd, follow_symlinks=True)
    os.close(fd)
    assert (d / "named").read_bytes() == b"nameless"


def _mkdir(d: Path) -> None:
    os.mkdir(d / "sub")
    assert (d / "sub").stat().st_nlink == 2
    assert d.stat().st_nlink == 4  # itself, "full", "sub"


def _symlink(d: Path) -> None:
    os.symlink("somewhere", d / "sym")
    assert os.readlink(d / "sym") == "somewhere"


def _fifo(d: Path) -> None:
    os.mkfifo(d / "fifo")
    assert (d / "fifo").is_fifo()


def _link(d: Path) -> None:
    os.link(d / "old", d / "second")
    assert (d / "old").stat().st_nlink == 2


def _unlink(d: Path) -> None:
    os.unlink(d / "old")
    assert not (d / "old").exists()


def _rmdir(d: Path) -> None:
    os.unlink(d / "full" / "inside")
    os.rmdir(d / "full")
    assert d.stat().st_nlink == 2


def _rename(d: Path) -> None:
    os.rename(d / "old", d / "moved")
    assert not (d / "old").exists()
    assert (d / "moved").read_bytes() == b"old bytes"


def _rename_over(d: Path) -> None:
    os.rename(d / "old", d / "other")
    assert (d / "other").read_bytes() == b"old bytes"
    assert not (d / "old").exists()


def _rename_directory(d: Path) -> None:
    os.rename(d / "full", d / "full2")
    assert (d / "full2" / "inside").read_bytes() == b"in"
    assert d.stat().st_nlink == 3


def _chmod(d: Path) -> None:
    os.chmod(d / "old", 0o600)
    assert (d / "old").stat().st_mode & 0o777 == 0o600


def _truncate(d: Path) -> None:
    os.truncate(d / "old", 3)
    assert (d / "old").read_bytes() == b"old"


def _setxattr(d: Path) -> None:
    os.setxattr(d / "old", "user.a", b"1", os.XATTR_CREATE)
    assert os.getxattr(d / "old", "user.a") == b"1"


def _replace_xattr(d: Path) -> None:
    os.setxattr(d / "other", "user.kept", b"2", os.XATTR_REPLACE)
    assert os.getxattr(d / "other", "user.kept") == b"2"


def _removexattr(d: Path) -> None:
    os.removexattr(d / "other", "user.kept")
    assert os.listxattr(d / "other") == []


CHANGES: list[tuple[str, Change]] = [
    ("make", _create),
    ("make", _tmpfile),
    ("make", _mkdir),
    ("make", _symlink),
    ("make", _fifo),
    ("link", _link),
    ("link", _tmpfile),
    ("unlink", _unlink),
    ("unlink", _rmdir),
    ("rmdir", _rmdir),
    ("rename", _rename),
    ("rename", _rename_over),
    ("rename", _rename_directory),
    ("setattr", _chmod),
    ("setattr", _truncate),
    ("setattr", _create),  # the end of a generation, at close
    ("setxattr", _setxattr),
    ("setxattr", _replace_xattr),
    ("setxattr", _removexattr),
]


@pytest.fixture(scope="module", params=RESENDS)
def faulty(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """A mount whose worker dies where the file "fault" says."""
    mount = Mount.start(size="256MiB", env=FAULTS | RESENDS[request.param])
    yield mount
    mount.close()


@pytest.mark.mount
@pytest.mark.parametrize("moment", ["before_commit", "after_commit"])
@pytest.mark.parametrize(
    ("point", "change"), CHANGES, ids=[f"{p}-{c.__name__[1:]}" for p, c in CHANGES]
)
def test_dies_around_commit(faulty: Mount, point: str, change: Change, moment: str) -> None:
    top = faulty.path / f"{point}-{change.__name__}-{moment}"
    (top / "full").mkdir(parents=True)
    (top / "old").write_bytes(b"old bytes")
    (top / "other").write_bytes(b"other bytes")
    (top / "full" / "inside").write_bytes(b"in")
    os.setxattr(top / "other", "user.kept", b"1")
    restarts = faulty.state()["worker_restarts"]
    fault = faulty.run_dir / faulty.name / "index" / "fault"
    fault.write_text(f"{point}:{moment}")
    change(top)
    assert not fault.exists(), "the fault was not reached"
    wait_restarts(faulty, restarts + 1)
    used = faulty.status()["arena"]["used_bytes"]
    subprocess.run(["rm", "-r", str(top)], check=True, timeout=30)
    assert faulty.status()["arena"]["used_bytes"] <= used


@pytest.mark.timeout(60)
def test_hung_worker_is_replaced(make_mount: Callable[..., Mount], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("hang_timeout_s = 1.5\n")
    mount = make_mount(env=FAULTS, extra_args=("--config", str(config)))
    (mount.run_dir / mount.name / "index" / "fault").write_text("hang make:after_commit")
    (mount.path / "d").mkdir()
    assert (mount.path / "d").is_dir()
    wait_restarts(mount, 1)
    assert "has not answered" in mount.log()


@pytest.mark.timeout(60)
def test_request_that_kills_every_worker_gets_eio(make_mount: Callable[..., Mount]) -> None:
    mount = make_mount(env=FAULTS)
    fault = mount.run_dir / mount.name / "index" / "fault"
    fault.write_text("always link:before_commit")
    (mount.path / "a").write_bytes(b"a")
    with pytest.raises(OSError, match="Input/output error"):
        os.link(mount.path / "a", mount.path / "b")
    assert (mount.path / "a").read_bytes() == b"a"
    wait_restarts(mount, 3)
    fault.unlink()
    os.link(mount.path / "a", mount.path / "b")


@pytest.mark.timeout(90)
def test_no_worker_to_be_had_gives_eio_and_ends(
    make_mount: Callable[..., Mount], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("give_up_s = 2.0\n")
    mount = make_mount(env=FAULTS, extra_args=("--config", str(config)))
    held = open(mount.path / "held", "wb", buffering=0)  # noqa: SIM115
    fault = mount.run_dir / mount.name / "index" / "fault"
    fault.write_text("always start")
    mount.kill_worker()
    with pytest.raises(OSError) as failed:
        (mount.path / "d").mkdir()
    assert failed.value.errno == errno.EIO
    assert held.write(b"bytes still move") == 16
    fault.unlink()
    wait_until(lambda: mount.state()["worker_pid"], 30, "a worker again")
    held.close()
    (mount.path / "d").mkdir()
    assert (mount.path / "held").read_bytes() == b"bytes still move"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which_lane", ["passthrough", "plain"])
def test_supervisor_killed_then_mounted_again(
    make_mount: Callable[..., Mount], which_lane: str
) -> None:
    mount = make_mount(lane=which_lane)
    files = {f"f{i}": random.randbytes(i * 10_000) for i in range(20)}
    for name, data in files.items():
        (mount.path / name).write_bytes(data)
    os.symlink("f1", mount.path / "sym")
    os.utime(mount.path / "f2", ns=(123_456_789, 987_654_321))
    unlinked = open(mount.path / "gone", "wb")  # noqa: SIM115
    unlinked.write(b"x" * 50_000)
    unlinked.flush()
    os.unlink(mount.path / "gone")
    still_open = os.open(mount.path / "f3", os.O_RDWR)
    mount.kill_supervisor()
    with pytest.raises(OSError) as failed:
        os.listdir(mount.path)
    assert failed.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert "dead" in mount.cli("status").stdout
    if which_lane == "passthrough":
        assert os.pread(still_open, 30_000, 0) == files["f3"]
        os.pwrite(still_open, b"late", 0)
        files["f3"] = b"late" + files["f3"][4:]
    mount.mount()
    for name, data in files.items():
        assert (mount.path / name).read_bytes() == data
    assert os.readlink(mount.path / "sym") == "f1"
    assert (mount.path / "f2").stat().st_mtime_ns == 987_654_321
    assert not (mount.path / "gone").exists()
    backing = mount.run_dir / mount.name / "arena" / "data"
    assert len(list(backing.iterdir())) == len(files)
    for close in (lambda: os.close(still_open), unlinked.close):
        with pytest.raises(OSError) as failed:  # its mount is gone, so close(2) cannot publish
            close()
        assert failed.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)


@pytest.mark.timeout(60)
def test_stopped_supervisor_does_not_cost_the_worker(
    make_mount: Callable[..., Mount], tmp_path: Path
) -> None:
    """A machine that was suspended, or a debugger, is no hung worker."""
    config = tmp_path / "c.toml"
    config.write_text("hang_timeout_s = 1.5\n")
    mount = make_mount(extra_args=("--config", str(config)))
    pid = mount.supervisor_pid
    os.kill(pid, 19)
    time.sleep(4)
    os.kill(pid, 18)
    (mount.path / "d").mkdir()
    time.sleep(2)
    wait_restarts(mount, 0)
