"""A full arena: ENOSPC for who writes, nothing for anybody else, and room again at once."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.harness import Mount, wait_until

MIB = 1 << 20
SIZE = 64 * MIB


@pytest.fixture(scope="module", params=harness.LANES)
def small(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """A 64 MiB arena."""
    mount = Mount.start(size="64MiB", lane=request.param)
    yield mount
    mount.close()


pytestmark = pytest.mark.mount


def fill(path: Path, block: bytes = b"f" * MIB) -> int:
    """Write until ENOSPC; the bytes that went in."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    done = 0
    try:
        while True:
            done += os.write(fd, block)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(fd)
    return done


def free_bytes(mount: Mount) -> int:
    space = os.statvfs(mount.path)
    return space.f_bavail * space.f_frsize


def test_full_arena_spares_other_files(small: Mount) -> None:
    data = os.urandom(10 * MIB)
    (small.path / "kept").write_bytes(data)
    done = fill(small.path / "filler")
    assert SIZE - 12 * MIB < done < SIZE
    assert free_bytes(small) < MIB
    assert (small.path / "filler").stat().st_size == done
    assert (small.path / "kept").read_bytes() == data
    (small.path / "empty").mkdir()
    os.rename(small.path / "kept", small.path / "empty" / "kept")
    assert (small.path / "empty" / "kept").read_bytes() == data
    with open(small.path / "filler", "rb") as filler:
        assert filler.read(MIB) == b"f" * MIB
    os.unlink(small.path / "filler")
    (small.path / "retry").write_bytes(data * 4)
    assert (small.path / "retry").read_bytes() == data * 4
    subprocess.run(["rm", "-r", f"{small.path}/retry", f"{small.path}/empty"], check=True)


def test_unlinked_space_is_free_at_once(small: Mount) -> None:
    """A checkpoint of most of the arena, replaced again and again with no pause."""
    before = free_bytes(small)
    data = b"c" * (SIZE * 3 // 4)
    for _ in range(20):
        (small.path / "ckpt").write_bytes(data)
        os.unlink(small.path / "ckpt")
    assert free_bytes(small) >= before - MIB


def test_overwritten_and_truncated_space_is_free_at_once(small: Mount) -> None:
    data = b"c" * (SIZE * 3 // 4)
    for _ in range(10):
        (small.path / "ckpt").write_bytes(data)  # O_TRUNC
    for _ in range(10):
        (small.path / "new").write_bytes(b"n" * (SIZE // 8))
        os.rename(small.path / "new", small.path / "latest")
    os.truncate(small.path / "ckpt", 0)
    assert free_bytes(small) > SIZE * 3 // 4
    os.unlink(small.path / "ckpt")
    os.unlink(small.path / "latest")


@pytest.mark.parametrize("user", ["descriptor", "mapping"])
def test_unlinked_file_in_use_keeps_its_memory_until_the_last_user(small: Mount, user: str) -> None:
    before = free_bytes(small)
    path = small.path / "used"
    path.write_bytes(b"u" * (20 * MIB))
    fd = os.open(path, os.O_RDWR)
    view = mmap.mmap(fd, 20 * MIB) if user == "mapping" else None
    if view is not None:
        os.close(fd)
    os.unlink(path)
    assert free_bytes(small) <= before - 20 * MIB
    if view is None:
        assert os.pread(fd, 4, 20 * MIB - 4) == b"uuuu"
        os.close(fd)
    else:
        assert view[-4:] == b"uuuu"
        view.close()
    wait_until(lambda: free_bytes(small) >= before, 5, "its memory back")


def test_failed_allocation_leaves_no_trace(small: Mount) -> None:
    before = free_bytes(small)
    fd = os.open(small.path / "a", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(fd, 0, 2 * SIZE)
    os.close(fd)
    os.unlink(small.path / "a")
    assert free_bytes(small) >= before


WRITER = """
import errno, os, sys
path = sys.argv[1]
for number in range(40):
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(24):
                assert file.write(b"w" * (1 << 20)) > 0
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        print("full")
    os.unlink(path)
"""


def test_eight_writers_fill_it(small: Mount) -> None:
    kept = os.urandom(MIB)
    (small.path / "kept").write_bytes(kept)
    command = [sys.executable, "-c", WRITER]
    writers = [
        subprocess.Popen([*command, str(small.path / f"w{number}")], stdout=subprocess.PIPE)
        for number in range(8)
    ]
    outputs = [writer.communicate(timeout=90)[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 8
    assert any(outputs), "the arena was never full"
    assert (small.path / "kept").read_bytes() == kept
    os.unlink(small.path / "kept")
    wait_until(lambda: free_bytes(small) > SIZE - MIB, 5, "all space back")


def test_full_index_refuses_new_names_but_deletes(make_mount: Callable[..., Mount]) -> None:
    mount = make_mount(size="1GiB")
    index = mount.run_dir / mount.name / "index"
    options = "remount,size=14m"
    subprocess.run(["mount", "-o", options, str(index)], check=True, timeout=10)
    made = 0
    with pytest.raises(OSError) as failed:
        while made < 200_000:
            os.mkdir(mount.path / f"{made:0200d}")
            made += 1
    assert failed.value.errno == errno.ENOSPC
    assert made > 1000
    with pytest.raises(OSError, match="No space left"):
        (mount.path / "more").touch()
    for number in range(made):
        os.rmdir(mount.path / f"{number:0200d}")
    (mount.path / "again").write_bytes(b"again")
    assert mount.state()["worker_restarts"] == 0


def test_nothing_stays_open_after_many_files(small: Mount) -> None:
    before = free_bytes(small)
    supervisor = small.supervisor_pid
    descriptors = len(os.listdir(f"/proc/{supervisor}/fd"))
    for number in range(300):
        path = small.path / f"n{number % 10}"
        path.write_bytes(b"n" * 100_000)
        os.replace(path, small.path / "current")
    os.unlink(small.path / "current")
    wait_until(lambda: free_bytes(small) >= before, 5, "all memory back")
    assert len(os.listdir(f"/proc/{supervisor}/fd")) <= descriptors


@pytest.mark.parametrize("which_lane", harness.LANES)
def test_lost_bytes_are_eio_never_zeros(make_mount: Callable[..., Mount], which_lane: str) -> None:
    mount = make_mount(lane=which_lane)
    (mount.path / "lost").write_bytes(b"x" * 10_000)
    ino = (mount.path / "lost").stat().st_ino
    os.unlink(mount.run_dir / mount.name / "arena" / "data" / str(ino))
    for _ in range(2):
        with pytest.raises(OSError) as failed:
            (mount.path / "lost").read_bytes()
        assert failed.value.errno == errno.EIO
        assert (mount.path / "lost").stat().st_size == 10_000
        mount.umount(discard=False)
        mount.mount()
    os.unlink(mount.path / "lost")
    (mount.path / "lost").write_bytes(b"new")
    assert (mount.path / "lost").read_bytes() == b"new"


MAPPER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8 << 20)
view = mmap.mmap(fd, 8 << 20)
for offset in range(0, 8 << 20, 4096):
    view[offset] = 1
try:
    view.flush()
except OSError as error:
    print(error.errno)
"""


def test_store_through_a_mapping_into_a_full_arena(small: Mount) -> None:
    """As on tmpfs SIGBUS; where the page cache stands between (plain lane), msync tells."""
    kept = os.urandom(MIB)
    (small.path / "kept").write_bytes(kept)
    fill(small.path / "filler")
    command = [sys.executable, "-c", MAPPER, str(small.path / "mapped")]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False)
    if small.lane == "passthrough":
        assert done.returncode == -signal.SIGBUS
    else:
        assert int(done.stdout) in (errno.ENOSPC, errno.EIO)
    assert (small.path / "kept").read_bytes() == kept
    for name in ("kept", "filler", "mapped"):
        os.unlink(small.path / name)
    (small.path / "again").write_bytes(kept)
    os.unlink(small.path / "again")


def test_reading_holes_takes_no_memory(small: Mount) -> None:
    """A mapping of the backing file would take a page for each hole that is read, and fail when there is none."""
    with open(small.path / "sparse", "wb") as file:
        file.truncate(4 * SIZE)
    (small.path / "end").write_bytes(b"e")
    before = free_bytes(small)
    with open(small.path / "sparse", "rb") as file:
        while data := file.read(MIB):
            assert not data.strip(b"\0")
    assert free_bytes(small) == before
    fill(small.path / "filler")
    with open(small.path / "sparse", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read(2 * MIB) == bytes(2 * MIB)
    for name in ("sparse", "end", "filler"):
        os.unlink(small.path / name)
