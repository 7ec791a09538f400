"""mount, umount, status and ls, as a person meets them: what works, and what each refusal says."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.harness import REPO_ROOT, Mount, mounts_under, wait_until

pytestmark = pytest.mark.mount
MakeMount = Callable[..., Mount]


@pytest.fixture
def prepared() -> Iterator[Mount]:
    """Everything but the mount."""
    mount = Mount.prepare(lane="plain")
    yield mount
    mount.close()


def refused(mount: Mount, *args: str, code: int) -> str:
    """The one line of stderr with which `ckptfs ARGS` failed."""
    done = mount.cli(*args, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr, mount.log())
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_mount_twice_is_busy(make_mount: MakeMount) -> None:
    mount = make_mount()
    (mount.path / "a").write_text("a")
    said = refused(mount, "mount", str(mount.path), code=4)
    assert "already mounted" in said
    assert str(mount.path) in said
    other = mount.base / "other"
    other.mkdir()
    said = refused(mount, "mount", str(other), "--name", mount.name, code=4)
    assert "choose another --name" in said
    assert (mount.path / "a").read_text() == "a"


def test_mount_over_stacked_dead_mounts(make_mount: MakeMount) -> None:
    mount = make_mount()
    (mount.path / "a").write_text("a")
    mount.kill_supervisor()
    mount.mount()
    mount.kill_supervisor()
    mount.mount()
    assert (mount.path / "a").read_text() == "a"
    assert len([m for m in mounts_under(mount.path) if m[1].startswith("fuse")]) == 1


def test_nonempty_directory(prepared: Mount) -> None:
    (prepared.path / "precious").write_text("p")
    said = refused(prepared, "mount", str(prepared.path), "--size", "64MiB", code=1)
    assert "not empty" in said
    assert "--nonempty" in said
    prepared.mount(size="64MiB", extra_args=("--nonempty",))
    assert os.listdir(prepared.path) == []
    prepared.umount()
    assert (prepared.path / "precious").read_text() == "p"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--size", "900TiB"), 1, "of RAM"),
        (("--size", "12 parsecs"), 2, "8GiB"),
        (("--size", "1KiB"), 2, "at least"),
        (("--size", "150%"), 2, "at most 100"),
        (("--name", "a/b"), 2, "allowed are"),
        (("--require-passthrough", "--force-plain"), 2, "contradict"),
        (("--config", "/nonexistent.toml"), 2, "No such file"),
    ],
)
def test_bad_settings(prepared: Mount, args: tuple[str, ...], code: int, words: str) -> None:
    assert words in refused(prepared, "mount", str(prepared.path), *args, code=code)
    assert mounts_under(prepared.base) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sise = '1GiB'\n", "unknown key 'sise'"),
        ("size = 5\n", "Expected `str`"),
        ("size = \n", "Invalid value"),
        ("hang_timeout_s = -1.0\n", "allowed are"),
    ],
)
def test_bad_config_file(prepared: Mount, text: str, words: str) -> None:
    config = prepared.base / "c.toml"
    config.write_text(text)
    said = refused(prepared, "mount", str(prepared.path), "--config", str(config), code=2)
    assert words in said
    assert "c.toml" in said


def test_config_file_is_used_and_flags_win(prepared: Mount) -> None:
    config = prepared.base / "c.toml"
    config.write_text("size = '128MiB'\nforce_plain = true\n")
    name = ("--name", prepared.name, "--config", str(config))
    prepared.cli("mount", str(prepared.path), *name, "--size", "64MiB")
    status = prepared.status()
    assert status["lane"] == "plain"
    assert status["arena"]["size_bytes"] == 64 << 20


def test_missing_and_wrong_mountpoint(prepared: Mount) -> None:
    missing = prepared.base / "missing"
    assert "mkdir -p" in refused(prepared, "mount", str(missing), code=1)
    file = prepared.base / "file"
    file.write_text("")
    assert "not a directory" in refused(prepared, "mount", str(file), code=1)
    for command in ("umount", "restart", "status"):
        assert "no ckptfs" in refused(prepared, command, str(prepared.base), code=3)
    assert "not on a ckptfs" in refused(prepared, "ls", str(prepared.base), code=3)


def test_without_dev_fuse(prepared: Mount) -> None:
    command = f"mount -t tmpfs none /dev && {sys.executable} -m mount.cli mount {prepared.path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env=prepared.env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "modprobe fuse" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_root_without_cap_sys_admin(prepared: Mount) -> None:
    """As in a container: nothing can be mounted, and that is said; nothing is left."""
    command = f"{sys.executable} -m mount.cli mount {prepared.path} --name {prepared.name}"
    done = subprocess.run(
        ["capsh", "--drop=cap_sys_admin", "--", "-c", command],
        env=prepared.env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "CAP_SYS_ADMIN" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert mounts_under(prepared.base) == []


def test_failed_start_leaves_nothing_mounted(prepared: Mount) -> None:
    broken = prepared.base / "broken"
    broken.mkdir()
    (broken / "pyfuse3.py").write_text("raise ImportError('libfuse3.so.3 is missing')\n")
    prepared.env["PYTHONPATH"] = f"{REPO_ROOT}:{broken}"
    args = ("mount", str(prepared.path), "--name", prepared.name, "--size", "64MiB")
    said = refused(prepared, *args, code=1)
    assert str(prepared.run_dir / prepared.name / "log") in said
    assert "libfuse3.so.3 is missing" in prepared.log()
    assert mounts_under(prepared.base) == []
    prepared.env["PYTHONPATH"] = str(REPO_ROOT)
    prepared.mount(size="64MiB")


def test_busy_umount_names_its_users(make_mount: MakeMount) -> None:
    mount = make_mount()
    with open(mount.path / "held", "wb", buffering=0) as held:
        said = refused(mount, "umount", str(mount.path), "--timeout", "0.3", code=4)
        assert f"pid {os.getpid()}" in said
        held.write(b"x")
        supervisor = mount.supervisor_pid
        os.kill(supervisor, signal.SIGTERM)  # detached now, but served until its users are gone
        wait_until(lambda: not os.path.ismount(mount.path), 5, "detached")
        held.write(b"y")
    wait_until(lambda: not harness.pid_alive(supervisor), 5, "the supervisor's end")
    mount.mount()
    assert (mount.path / "held").read_bytes() == b"xy"


def test_forced_umount(make_mount: MakeMount) -> None:
    mount = make_mount()
    held = os.open(mount.path / "held", os.O_WRONLY | os.O_CREAT)
    mount.cli("umount", str(mount.path), "--force", "--timeout", "1")
    assert not os.path.ismount(mount.path)
    with pytest.raises(OSError, match="not connected"):
        os.close(held)


def test_arena_is_kept_resized_and_discarded(make_mount: MakeMount) -> None:
    mount = make_mount(size="256MiB")
    (mount.path / "a").write_bytes(os.urandom(100 << 20))
    data = (mount.path / "a").read_bytes()
    said = mount.cli("umount", str(mount.path)).stdout
    assert "kept (100" in said
    assert "--discard" in said
    assert mount.status()["state"] == "unmounted"
    too_small = ("mount", str(mount.path), "--name", mount.name, "--size", "64MiB")
    assert "choose a --size above" in refused(mount, *too_small, code=1)
    mount.mount(size="512MiB")
    assert mount.status()["arena"]["size_bytes"] == 512 << 20
    assert (mount.path / "a").read_bytes() == data
    mount.umount(discard=True)
    assert mounts_under(mount.base) == []
    assert not (mount.run_dir / mount.name).exists()
    mount.mount()
    assert os.listdir(mount.path) == []


def test_private_state_is_the_owners_alone(make_mount: MakeMount) -> None:
    mount = make_mount()
    private = mount.run_dir / mount.name
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "arena").stat().st_mode & 0o777 == 0o700
    assert (private / "control.sock").stat().st_mode & 0o777 == 0o600


def test_somebody_elses_mount(make_mount: MakeMount, prepared: Mount) -> None:
    mount = make_mount()
    for command in ("status", "umount", "restart", "ls"):
        assert "another user" in refused(prepared, command, str(mount.path), code=1)
    assert mount.answers()


def test_status_and_ls(make_mount: MakeMount) -> None:
    mount = make_mount()
    (mount.path / "d").mkdir()
    (mount.path / "d" / "data").write_bytes(b"x" * 100_000)
    (mount.path / "d" / os.fsdecode(b"odd\xff\n")).write_bytes(b"")
    os.symlink("data", mount.path / "d" / "sym")
    status = mount.status()
    assert (status["files"], status["directories"]) == (3, 2)
    assert status["arena"]["used_bytes"] >= 100_000
    assert mount.name in mount.cli("status").stdout
    listed = json.loads(mount.cli("ls", str(mount.path / "d"), "--json").stdout)
    entries = {entry["name"]: entry for entry in listed["entries"]}
    assert set(entries) == {"data", "odd\\udcff\n", "sym"}
    assert entries["data"]["size_bytes"] == 100_000
    assert entries["data"]["memory_bytes"] >= 100_000
    assert entries["data"]["state"] == "local"
    backing = Path(listed["arena"]) / str(entries["data"]["ino"])
    assert backing.read_bytes() == b"x" * 100_000
    with open(mount.path / "d" / "data", "ab"):
        table = mount.cli("ls", str(mount.path / "d" / "data")).stdout
    assert "writing" in table
    assert "no such file" in refused(mount, "ls", str(mount.path / "nope"), code=1)


def test_ls_of_many(make_mount: MakeMount) -> None:
    mount = make_mount()
    for number in range(2500):
        (mount.path / str(number)).touch()
    listed = json.loads(mount.cli("ls", str(mount.path), "--json").stdout)
    assert {entry["name"] for entry in listed["entries"]} == {str(n) for n in range(2500)}


def test_foreground_ends_with_ctrl_c(prepared: Mount) -> None:
    command = [sys.executable, "-m", "mount.cli", "mount", str(prepared.path), "--foreground"]
    command += ["--size", "64MiB", "--name", prepared.name]
    with open(prepared.base / "err", "wb") as err:
        process = subprocess.Popen(command, env=prepared.env, cwd="/", stderr=err)
    try:
        wait_until(lambda: os.path.ismount(prepared.path), 15, "mounted")
        (prepared.path / "a").write_text("a")
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
    assert not os.path.ismount(prepared.path)
    assert "mounted" in (prepared.base / "err").read_text()


def test_damaged_and_foreign_index(make_mount: MakeMount) -> None:
    mount = make_mount()
    (mount.path / "a").write_bytes(b"bytes that must not be erased")
    mount.umount(discard=False)
    private = mount.run_dir / mount.name
    index = private / "index" / "index.sqlite"
    database = sqlite3.connect(index)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the worker is killed, not closed
    database.close()
    whole = index.read_bytes()
    damages = {
        "garbage": os.urandom(len(whole)),
        "torn": whole[:1024] + os.urandom(2048) + whole[3072:],
        "foreign": whole[:68] + b"\0\0\0\7" + whole[72:],
        "newer": whole[:60] + b"\0\0\0\x63" + whole[64:],
        "empty": b"",
    }
    for suffix in ("-wal", "-shm"):
        Path(f"{index}{suffix}").unlink(missing_ok=True)
    args = ("mount", str(mount.path), "--name", mount.name, "--size", "1GiB")
    for kind, damage in damages.items():
        index.write_bytes(damage)
        said = refused(mount, *args, code=1)
        assert "index.sqlite" in said, kind
        assert "--set-aside" in said, kind
        assert index.read_bytes() == damage, kind
        assert not os.path.ismount(mount.path)
    mount.cli(*args, "--set-aside")
    assert os.listdir(mount.path) == []
    [aside] = mount.run_dir.glob(f"{mount.name}.aside-*")
    kept = [path.read_bytes() for path in (aside / "arena" / "data").iterdir()]
    assert kept == [b"bytes that must not be erased"]
    mount.umount()
    index_aside = aside / "index" / "index.sqlite"
    index_aside.write_bytes(whole)
    mount.cli("mount", str(mount.path), "--name", aside.name, "--size", "1GiB")
    assert (mount.path / "a").read_bytes() == b"bytes that must not be erased"


@pytest.fixture
def mount_helper() -> Iterator[Path]:
    """The helper where mount(8) looks for it; what was there before comes back."""
    path = Path("/sbin/mount.fuse.ckptfs")
    before = path.read_bytes() if path.exists() else None
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    subprocess.run(
        [sys.executable, "-m", "mount.cli", "install-helper"], env=environment, check=True
    )
    yield path
    path.unlink()
    if before is not None:
        path.write_bytes(before)
        path.chmod(0o755)


def test_mount_8_and_fstab(prepared: Mount, mount_helper: Path) -> None:
    options = f"size=64MiB,force_plain,nofail,name={prepared.name}"
    target = str(prepared.path)
    run = {"env": prepared.env, "check": True, "timeout": 60, "cwd": "/"}
    subprocess.run(["mount", "-t", "fuse.ckptfs", "ckptfs", target, "-o", options], **run)
    assert prepared.status()["lane"] == "plain"
    assert prepared.status()["arena"]["size_bytes"] == 64 << 20
    subprocess.run(["umount", target], **run)
    fstab = prepared.base / "fstab"
    fstab.write_text(f"ckptfs {target} fuse.ckptfs {options},_netdev 0 0\n")
    subprocess.run(["mount", "--fstab", str(fstab), target], **run)
    (prepared.path / "a").write_text("a")
    wrong = options + ",sise=1GiB"
    wrong_run = run | {"check": False, "capture_output": True, "text": True}
    subprocess.run(["umount", target], **run)
    done = subprocess.run(
        ["mount", "-t", "fuse.ckptfs", "ckptfs", target, "-o", wrong], **wrong_run
    )
    assert done.returncode != 0
    assert "sise" in done.stderr


def readable_python(home: Path) -> tuple[str, Path]:
    """An interpreter and a directory of libraries that any user can read (a checkout may lie in /root)."""
    libraries = home / "lib"
    installed = Path(pytest.__file__).parent.parent
    unneeded = shutil.ignore_patterns(
        "torch*", "nvidia*", "triton*", "transformers*", "__pycache__"
    )
    shutil.copytree(installed, libraries, ignore=unneeded, symlinks=True)
    for package in ("fs", "replicator", "mount"):
        shutil.rmtree(libraries / package, ignore_errors=True)
        shutil.copytree(REPO_ROOT / package, libraries / package)
    version = "python{}.{}".format(*sys.version_info)
    return shutil.which(version, path="/usr/bin:/usr/local/bin") or sys.executable, libraries


@pytest.fixture
def someone() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def test_as_a_user_without_root(prepared: Mount, someone: pwd.struct_passwd) -> None:
    """No CAP_SYS_ADMIN: fusermount3 mounts, passthrough is refused, the plain lane serves."""
    if shutil.which("fusermount3") is None:
        pytest.fail("fusermount3 is missing (package fuse3)")
    state = Path(f"/dev/shm/ckptfs-test-{os.getpid()}")
    state.mkdir()
    home = Path(f"/tmp/ckptfs-test-{os.getpid()}")
    home.mkdir()
    for path in (state, home):
        os.chown(path, someone.pw_uid, someone.pw_gid)
    python, libraries = readable_python(home)
    environment = prepared.env | {
        "CKPTFS_RUN_DIR": str(state / "run"),
        "PYTHONPATH": str(libraries),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def as_someone(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [
                "setpriv",
                f"--reuid={someone.pw_uid}",
                f"--regid={someone.pw_gid}",
                "--clear-groups",
                "--",
                *command,
            ],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr + done.stdout
        return done

    ckptfs = (python, "-m", "mount.cli")
    target = home / "mnt"
    device_mode = os.stat("/dev/fuse").st_mode
    try:
        as_someone("mkdir", str(target))
        os.chmod("/dev/fuse", 0o600)
        said = as_someone(*ckptfs, "mount", str(target), check=False)
        assert said.returncode == 1
        assert "chmod 666 /dev/fuse" in said.stderr
        os.chmod("/dev/fuse", 0o666)
        said = as_someone(*ckptfs, "mount", str(target), "--require-passthrough", check=False)
        assert said.returncode == 1
        assert "CAP_SYS_ADMIN" in said.stderr
        as_someone(*ckptfs, "mount", str(target), "--size", "32MiB")
        status = json.loads(as_someone(*ckptfs, "status", str(target), "--json").stdout)
        assert status["lane"] == "plain"
        script = f"""
import errno, os
p = {str(target)!r}
open(p + "/a", "wb").write(b"x" * 20_000_000)
try:
    open(p + "/b", "wb", buffering=0).write(b"y" * 20_000_000)
    f = open(p + "/b", "ab", buffering=0)
    while True: f.write(b"y" * 1_000_000)
except OSError as e:
    assert e.errno == errno.ENOSPC, e
assert open(p + "/a", "rb").read() == b"x" * 20_000_000
used = os.statvfs(p)
assert used.f_blocks * used.f_frsize == 32 << 20
os.unlink(p + "/a")
open(p + "/b", "wb").write(b"z" * 20_000_000)
assert open(p + "/b", "rb").read() == b"z" * 20_000_000
"""
        as_someone(python, "-c", script)
        as_someone(*ckptfs, "umount", str(target))
        as_someone(*ckptfs, "mount", str(target), "--size", "32MiB")
        as_someone("cmp", "-n", "3", str(target / "b"), "/dev/stdin", check=False)
        assert as_someone("ls", str(target)).stdout == "b\n"
        as_someone(*ckptfs, "umount", str(target), "--discard")
        assert not (state / "run").exists() or os.listdir(state / "run") == []
    finally:
        os.chmod("/dev/fuse", device_mode)
        as_someone(*ckptfs, "umount", str(target), "--force", "--discard", check=False)
        harness.detach(str(target))
        for pid in harness.pids_carrying(str(state)):
            harness.kill_pid(pid)
        time.sleep(0.1)
        shutil.rmtree(state, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
