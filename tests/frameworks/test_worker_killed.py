"""The filesystem's worker is killed with SIGKILL, again and again, while real programs work: none of them notices.

The programs check their own values; here it is only made sure that the kills came while they were at it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import lib
from tests.frameworks.test_tools import assert_same_tree, make_tree
from tests.harness import REPO_ROOT, Mount

pytestmark = pytest.mark.timeout(240)


class Killer:
    """Kills the worker of a mount at random moments, in a thread that ends with the block it is used in."""

    def __init__(self, mount: Mount, seed: int):
        self.kills = 0
        self._mount = mount
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def _run(self) -> None:
        pause_s = 0.02
        while not self._stop.wait(pause_s):
            pause_s = self._chance.uniform(0.05, 0.8)
            # A worker that has just gone anyway is no failure: the next round finds its successor.
            with contextlib.suppress(ProcessLookupError):
                self._mount.kill_worker()
                self.kills += 1

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.fixture
def killed(make_mount: Callable[..., Mount], lane: str) -> Iterator[tuple[Path, Killer]]:
    """A mount whose worker is being killed, from the first use of the Killer's block on."""
    mount = make_mount(size="2GiB", lane=lane)
    yield mount.path, Killer(mount, seed=20)
    assert mount.answers()
    assert mount.status()["state"] == "mounted"


def test_torch_saves_and_loads(torch: Any, killed: tuple[Path, Killer]) -> None:
    path, killer = killed
    generator = torch.Generator().manual_seed(1)
    with killer:
        for number in range(1000):
            want = torch.randn(500_000 + number, generator=generator)
            temporary = path / "model.pt.tmp"
            torch.save({"weight": want, "step": number}, temporary)
            os.replace(temporary, path / "model.pt")
            mmap = bool(number % 2)
            got = torch.load(path / "model.pt", weights_only=True, mmap=mmap)
            assert got["step"] == number
            assert torch.equal(got["weight"], want)
            assert os.listdir(path) == ["model.pt"]
            if killer.kills >= 8:
                break
    assert killer.kills >= 8


@pytest.mark.parametrize("lane", ["passthrough"], indirect=True)
def test_training_loop(torch: Any, killed: tuple[Path, Killer], tmpfs_dir: Path) -> None:
    path, killer = killed
    train = (sys.executable, REPO_ROOT / "examples" / "train.py")
    options = ("--steps", "120", "--every", "2", "--width", "512", "--pause-s", "0.01")
    with killer:
        output, uninterrupted = lib.run_all(
            [(*train, path / "run", *options), (*train, tmpfs_dir / "run", *options)],
            timeout_s=100,
            envs=[{}, {}],
        )
    assert killer.kills >= 5
    assert output.splitlines()[-1] == uninterrupted.splitlines()[-1]
    names = set(os.listdir(path / "run"))
    assert names == {"step-000116.pt", "step-000118.pt", "step-000120.pt"}
    for name in names:
        same = (path / "run" / name).read_bytes() == (tmpfs_dir / "run" / name).read_bytes()
        assert same, name


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["passthrough"], indirect=True)
def test_distributed_checkpoints(torch: Any, killed: tuple[Path, Killer]) -> None:
    path, killer = killed
    with killer:
        lib.ranks("dcp", 2, "save", path / "world-2")
        lib.ranks("dcp", 1, "load", path / "world-2")
    assert killer.kills >= 5


def test_sqlite(killed: tuple[Path, Killer]) -> None:
    path, killer = killed
    database = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    database.execute("pragma journal_mode = wal")
    database.execute("create table account (id integer primary key, amount integer)")
    database.execute("create table entry (writer integer, number integer, text text)")
    database.executemany("insert into account values (?, 1000)", [(n,) for n in range(100)])
    database.close()
    commands = [
        (sys.executable, lib.JOBS / "sqlite_writer.py", path / "run.sqlite", str(writer), "2500")
        for writer in range(2)
    ]
    with killer:
        lib.run_all(commands, timeout_s=100, envs=[{}, {}])
    assert killer.kills >= 1
    database = sqlite3.connect(path / "run.sqlite", isolation_level=None)
    assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert database.execute("select sum(amount) from account").fetchone() == (100_000,)
    assert database.execute("select count(*) from entry").fetchone() == (5000,)
    database.close()


def test_trees_copied_packed_and_removed(killed: tuple[Path, Killer], tmpfs_dir: Path) -> None:
    """Thousands of small changes of the namespace, each of which must happen once and only once."""
    path, killer = killed
    make_tree(tmpfs_dir / "tree", files=300)
    with killer:
        for number in range(4):
            copy = path / f"copy-{number}"
            lib.run("cp", "-a", tmpfs_dir / "tree", copy)
            assert_same_tree(tmpfs_dir / "tree", copy)
            lib.run("rsync", "-aHX", f"{copy}/", path / "mirror", timeout_s=60)
            assert_same_tree(tmpfs_dir / "tree", path / "mirror")
            lib.run("tar", "-C", path, "-cf", path / "tree.tar", copy.name)
            assert lib.run("tar", "-C", path, "--compare", "-f", path / "tree.tar") == ""
            lib.run("rm", "-r", path / "mirror", path / "tree.tar", copy)
            assert os.listdir(path) == []
    assert killer.kills >= 4


@pytest.mark.parametrize("lane", ["passthrough"], indirect=True)
def test_git(killed: tuple[Path, Killer]) -> None:
    path, killer = killed
    make_tree(path / "work")
    identity = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", path / "work")
    lib.run("git", "init", "-q", "-b", "main", path / "work")
    with killer:
        for number in range(15):
            (path / "work" / f"file-{number % 4}").write_text(f"{number}\n" * 50)
            lib.run(*identity, "add", "-A")
            lib.run(*identity, "commit", "-qm", str(number))
        lib.run("git", "clone", "-q", path / "work", path / "clone")
        lib.run(*identity, "gc", "-q", "--prune=now")
        for repository in ("work", "clone"):
            assert "error" not in lib.run(
                "git", "-C", path / repository, "fsck", "--full", "--strict"
            )
            assert lib.run("git", "-C", path / repository, "status", "--porcelain") == ""
    assert killer.kills >= 3
    assert lib.run(*identity, "rev-list", "--count", "HEAD").strip() == "15"
