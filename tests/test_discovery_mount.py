"""An empty arena mounted on what a tier holds already, with the kernel and everyday tools."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fs.tiers.directory import DirectoryTier
from tests.harness import Mount

MakeMount = Callable[..., Mount]


def sh(command: str, cwd: Path) -> str:
    done = subprocess.run(
        ["sh", "-ec", command], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory that others filled."""
    kept = tmp_path / "tier"
    for step in (100, 200):
        (kept / f"step_{step}").mkdir(parents=True)
        for rank in range(40):
            (kept / f"step_{step}" / f"rank{rank:02}.pt").write_bytes(os.urandom(5000))
    (kept / "latest").write_text("step_200")
    return kept


def mounted(make_mount: MakeMount, kept: Path) -> Mount:
    return make_mount(size="256MiB", extra_args=["--durable", f"file://{kept}"])


def test_everyday_tools_see_what_is_there(make_mount: MakeMount, kept: Path) -> None:
    path = mounted(make_mount, kept).path
    assert sh("cat latest", path) == "step_200"
    assert sorted(os.listdir(path)) == ["latest", "step_100", "step_200"]
    assert sh("find . -type f | wc -l", path).strip() == "81"
    assert sh(f"diff -r . {kept} --exclude .ckptfs-tier && echo same", path) == "same\n"
    with pytest.raises(FileNotFoundError):
        os.stat(path / "nothing")
    with pytest.raises(FileExistsError):
        os.open(path / "step_100" / "rank07.pt", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert sh("rmdir step_100 2>&1 || echo $?", path).splitlines()[-1] == "1"


def test_what_is_changed_reaches_the_tier_and_an_empty_arena(
    make_mount: MakeMount, kept: Path
) -> None:
    mount = mounted(make_mount, kept)
    wanted = (kept / "step_100" / "rank03.pt").read_bytes()
    sh(
        "mv step_100 old && chmod 700 old && rm old/rank04.pt && ln -s old/rank03.pt link"
        " && mkdir -p new/empty && printf other > latest && chmod 640 latest && rm -r step_200",
        mount.path,
    )
    os.kill(mount.worker_pid, signal.SIGKILL)
    assert sorted(os.listdir(mount.path)) == ["latest", "link", "new", "old"]
    assert (mount.path / "link").read_bytes() == wanted
    mount.cli("wait", str(mount.path), "--until", "durable", "--timeout", "30")
    mount.close()
    assert not (kept / "step_200").exists()

    again = mounted(make_mount, kept).path
    assert stat.S_IMODE(os.stat(again / "old").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(again / "latest").st_mode) == 0o640
    assert (again / "latest").read_text() == "other"
    assert os.readlink(again / "link") == "old/rank03.pt"
    assert (again / "link").read_bytes() == wanted
    assert sorted(os.listdir(again)) == ["latest", "link", "new", "old"]
    assert os.listdir(again / "new") == ["empty"]
    assert len(os.listdir(again / "old")) == 39


def test_verify_reads_every_copy(make_mount: MakeMount, kept: Path) -> None:
    tier = DirectoryTier(str(kept))
    mount = mounted(make_mount, kept)
    (mount.path / "mine").write_bytes(b"m" * 100_000)
    mount.cli("wait", str(mount.path), "--until", "durable", "--timeout", "30")
    done = mount.cli("verify", str(mount.path), "--json", "--all")
    results = {each["path"]: each for each in json.loads(done.stdout)["results"]}
    assert len(results) == 82
    info = tier.head("mine")
    before = os.stat(kept / "mine")
    with open(kept / "mine", "r+b") as file:
        file.seek(500)
        file.write(b"x")
    os.utime(kept / "mine", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tier.head("mine").etag == info.etag
    done = mount.cli("verify", str(mount.path), check=False)
    assert done.returncode == 1
    assert "damaged" in done.stdout and "mine" in done.stdout
