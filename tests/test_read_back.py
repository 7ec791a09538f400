"""Files whose bytes are in the durable tier only, read and written through a real mount."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.harness import Mount

MIB = 1 << 20
MakeMount = Callable[..., Mount]
DATA = random.Random(5).randbytes(37 * MIB + 11)


@pytest.fixture(params=["resend", "no-resend", "plain"])
def mount(request: pytest.FixtureRequest, make_mount: MakeMount, tmp_path: Path) -> Mount:
    """With a directory as tier; over both lanes, and as on a kernel that cannot send requests again."""
    (tmp_path / "tier").mkdir()
    lane = "plain" if request.param == "plain" else None
    return make_mount(
        size="256MiB",
        extra_args=["--durable", f"file://{tmp_path}/tier"],
        env={"CKPTFS_NO_RESEND": "1"} if request.param == "no-resend" else {},
        **({"lane": lane} if lane else {}),
    )


def remote(mount: Mount, name: str, data: bytes = DATA) -> Path:
    """A file that is in the tier only."""
    path = mount.path / name
    path.write_bytes(data)
    mount.cli("wait", str(path), "--until", "durable", "--timeout", "60")
    mount.cli("evict", str(path))
    assert os.getxattr(path, "user.ckptfs.state") == b"remote"
    assert os.stat(path).st_size == len(data)
    return path


def test_read_mapped_and_changed(mount: Mount) -> None:
    path = remote(mount, "f")
    assert path.read_bytes() == DATA
    harness.wait_until(
        lambda: os.getxattr(path, "user.ckptfs.state") == b"durable", 10, "resident again"
    )
    mount.cli("evict", str(path))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[20 * MIB : 20 * MIB + 100] == DATA[20 * MIB : 20 * MIB + 100]
        assert mapped[-50:] == DATA[-50:]
        mapped.close()
    mount.cli("evict", str(path))
    with open(path, "r+b") as file:
        file.seek(10 * MIB)
        file.write(b"changed")
    wanted = DATA[: 10 * MIB] + b"changed" + DATA[10 * MIB + 7 :]
    assert path.read_bytes() == wanted
    mount.cli("wait", str(path), "--until", "durable", "--timeout", "60")
    assert path.read_bytes() == wanted


def test_removed_while_it_is_read(mount: Mount) -> None:
    path = remote(mount, "f")
    with open(path, "rb") as file:
        assert file.read(1000) == DATA[:1000]
        path.unlink()
        path.write_bytes(b"another")
        file.seek(0)
        assert file.read() == DATA
    assert path.read_bytes() == b"another"


def test_the_worker_is_killed_while_it_is_read(mount: Mount) -> None:
    path = remote(mount, "f")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    os.kill(mount.worker_pid, signal.SIGKILL)
    (mount.path / "other").write_bytes(b"others go on")
    reader.join(60)
    assert found == [DATA]
    assert (mount.path / "other").read_bytes() == b"others go on"


def test_a_tier_that_is_not_there_is_no_mount(make_mount: MakeMount, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        make_mount(size="64MiB", extra_args=["--durable", f"file://{tmp_path}/nowhere"])
