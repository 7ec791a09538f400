"""Draining at the end of a mount: umount, --discard, SIGTERM; and what a mount that is over left undone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fs.journal import State
from fs.reconcile import adopt
from fs.tiers.memory import MemoryTier
from mount import lifecycle
from mount.leftover import leftover
from mount.rundir import RunDir
from tests import harness
from tests.durable_node import OP, DurableNode, run
from tests.harness import Mount, wait_until

MakeMount = Callable[..., Mount]


# what a mount that is over left, without a mount


def kept_arena(base: Path, tier: MemoryTier) -> RunDir:
    """An arena with one file that is durable, one that waits, one that policy skips, and one that was open."""

    async def main() -> None:
        node = DurableNode(base / "kept", tier)
        adopt(node.index, tier.describe())
        async with node.running():
            await node.write("durable", b"d")
            await node.drained()
        await node.write("waiting", b"w" * 10)
        await node.write("skipped", b"s" * 20)
        with node.index.transaction():
            node.journal.skip(node.journal.at("skipped"), State.SKIPPED)
        _, attr = await node.vfs.create(1, b"open", 0o644, os.O_WRONLY, OP)
        node.store_bytes(attr.ino, b"o" * 30)
        node.close()

    run(main)
    found = RunDir("kept", base)
    os.close(found.lock() or 0)
    return found


def test_leftover_is_read_from_the_index(tmp_path: Path) -> None:
    found = leftover(kept_arena(tmp_path, MemoryTier()))
    assert found is not None
    assert found.tier == "memory:"
    assert [(left.key, left.size) for left in found.skipped] == [("skipped", 20)]
    assert {left.key for left in found.unsaved} == {"waiting", "open"}
    by_key = {left.key: left for left in found.unsaved}
    assert by_key["waiting"].size == 10
    assert "open when the mount ended" in by_key["open"].reason


def test_leftover_sees_what_was_written_past_the_index(tmp_path: Path) -> None:
    kept = kept_arena(tmp_path, MemoryTier())
    before = {left.key for left in (leftover(kept) or pytest.fail("no tier")).unsaved}
    assert "durable" not in before
    backing = next(p for p in (kept.arena / "data").iterdir() if p.read_bytes() == b"d")
    backing.write_bytes(b"more")
    now = leftover(kept)
    assert now is not None
    assert {left.key for left in now.unsaved} == before | {"durable"}


def test_discard_of_a_kept_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFS_RUN_DIR", str(tmp_path))
    kept = kept_arena(tmp_path, MemoryTier())
    with pytest.raises(lifecycle.NotDurable, match="memory:"):
        lifecycle.umount("kept", timeout_s=5, force=False, discard=True)
    assert kept.has_data()
    (kept.index / "index.sqlite").write_bytes(b"damaged beyond recognition" * 100)
    with pytest.raises(lifecycle.NotDurable, match="cannot be told"):
        lifecycle.umount("kept", timeout_s=5, force=False, discard=True)
    assert kept.has_data()
    lifecycle.umount("kept", timeout_s=5, force=True, discard=True)
    assert not kept.path.exists()


# mounts


class Disk:
    """A directory for a durable tier, which can be away for a while."""

    def __init__(self, base: Path) -> None:
        self.path = base / "tier"
        self._away = base / "away"
        self.path.mkdir()
        self.option = ("--durable", f"file://{self.path}")

    def leave(self) -> None:
        self.path.rename(self._away)

    def come_back(self) -> None:
        self._away.rename(self.path)

    def come_back_later(self, delay_s: float) -> threading.Timer:
        timer = threading.Timer(delay_s, self.come_back)
        timer.start()
        return timer


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def durable_mount(make_mount: MakeMount, disk: Disk, **settings: object) -> Mount:
    config = disk.path.parent / "c.toml"
    config.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    return make_mount(size="128MiB", extra_args=(*disk.option, "--config", str(config)))


def end_of(mount: Mount, supervisor: int, timeout_s: float) -> None:
    wait_until(lambda: not harness.pid_alive(supervisor), timeout_s, f"its end\n{mount.log()}")
    assert not os.path.ismount(mount.path)


def test_umount_drains(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk)
    disk.leave()
    (mount.path / "a").write_bytes(b"a" * 1000)
    timer = disk.come_back_later(1.0)
    done = mount.cli("umount", str(mount.path), "--drain-timeout", "20s")
    timer.join()
    assert (disk.path / "a").read_bytes() == b"a" * 1000
    assert "kept" in done.stdout
    assert done.stderr == ""


def test_umount_says_what_is_not_durable_and_a_later_mount_goes_on(
    make_mount: MakeMount, disk: Disk
) -> None:
    mount = durable_mount(make_mount, disk)
    disk.leave()
    for number in range(25):
        (mount.path / f"f{number:02}").write_bytes(b"x" * number)
    refused = mount.cli("umount", str(mount.path), "--discard", "--no-drain", check=False)
    assert refused.returncode == 6
    assert "still mounted: 25 changes would be lost" in refused.stderr
    assert mount.answers()
    left = mount.cli("umount", str(mount.path), "--drain-timeout", "300ms", check=False)
    assert left.returncode == 6, left.stderr
    assert not os.path.ismount(mount.path)
    assert "25 changes not durable" in left.stderr
    lines = left.stderr.splitlines()
    assert sum(line.startswith("  f") for line in lines) == 20
    assert "... and 5 more" in lines[-1]
    assert str(disk.path) in lines[1]  # the reason
    refused = mount.cli("umount", mount.name, "--discard", check=False)
    assert refused.returncode == 6
    assert "--discard --force" in refused.stderr
    disk.come_back()
    mount.mount(size="128MiB", extra_args=disk.option)
    mount.cli("wait", str(mount.path), "--timeout", "20s")
    assert {p.name: p.stat().st_size for p in disk.path.iterdir() if p.name[0] == "f"} == {
        f"f{number:02}": number for number in range(25)
    }
    mount.umount(discard=True)


def test_discard_forced_erases_and_does_not_wait(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk)
    disk.leave()
    (mount.path / "a").write_bytes(b"a")
    began_s = time.monotonic()
    done = mount.cli("umount", str(mount.path), "--discard", "--force")
    assert time.monotonic() - began_s < 8
    assert "not durable" in done.stderr
    assert not (mount.run_dir / mount.name).exists()


def test_sigterm_drains_while_the_mount_serves(make_mount: MakeMount, disk: Disk) -> None:
    """Also when the worker dies meanwhile."""
    mount = durable_mount(make_mount, disk, stop_grace_s=25.0)
    disk.leave()
    (mount.path / "a").write_bytes(b"a")
    supervisor = mount.supervisor_pid
    os.kill(supervisor, signal.SIGTERM)
    wait_until(lambda: mount.log().count("draining for") == 1, 10, "the drain")
    mount.wait_new_worker(mount.kill_worker())
    wait_until(lambda: mount.log().count("draining for") == 2, 10, "the next worker's drain")
    (mount.path / "b").write_bytes(b"b")  # served as ever
    disk.come_back()
    end_of(mount, supervisor, 15)
    assert (disk.path / "a").read_bytes() == b"a"
    assert (disk.path / "b").read_bytes() == b"b"
    assert "everything is durable" in mount.log()


def test_sigterm_ends_with_the_grace(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk, stop_grace_s=1.5)
    disk.leave()
    (mount.path / "a").write_bytes(b"a")
    supervisor = mount.supervisor_pid
    os.kill(supervisor, signal.SIGTERM)
    end_of(mount, supervisor, 5)
    assert "not durable: a" in mount.log()
    assert mount.status()["state"] == "unmounted"  # and kept


def test_second_sigterm_does_not_wait(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk, stop_grace_s=60.0)
    disk.leave()
    (mount.path / "a").write_bytes(b"a")
    supervisor = mount.supervisor_pid
    os.kill(supervisor, signal.SIGTERM)
    wait_until(lambda: "draining for" in mount.log(), 10, "the drain")
    os.kill(supervisor, signal.SIGTERM)
    end_of(mount, supervisor, 5)


def test_commands_on_a_mount(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk)
    step = mount.path / "step_1"
    step.mkdir()
    data = os.urandom(3 << 20)
    (step / "model").write_bytes(data)
    os.symlink("step_1", mount.path / "latest")
    mount.cli("wait", str(mount.path / "latest"), "--until", "durable", "--timeout", "20s")
    assert (disk.path / "step_1" / "model").read_bytes() == data
    model = str(step / "model")
    assert os.getxattr(model, "user.ckptfs.state") == b"durable"
    assert os.listxattr(model) == []
    with pytest.raises(PermissionError):
        os.setxattr(model, "user.ckptfs.state", b"local")
    with open(model, "rb"):
        stays = mount.cli("evict", "-r", str(step), check=False)
        assert stays.returncode == 1
        assert f"{model}: stays in memory: it is open" in stays.stderr
    wait_until(lambda: mount.cli("evict", model, check=False).returncode == 0, 10, "evicted")
    assert os.getxattr(model, "user.ckptfs.state") == b"remote"
    listed = mount.cli("ls", str(step)).stdout
    for word in ("generation", "age", "remote"):
        assert word in listed
    fetched = json.loads(mount.cli("prefetch", str(step), "--json").stdout)
    assert (fetched["done"], fetched["done_bytes"]) == (1, len(data))
    assert Path(model).read_bytes() == data
    [entry] = json.loads(mount.cli("ls", model, "--json").stdout)["entries"]
    assert (entry["state"], entry["since_ns"]) == ("durable", 0)
    assert entry["digest"] == os.getxattr(model, "user.ckptfs.digest").decode()
    disk.leave()
    (step / "late").write_bytes(b"late")
    late = mount.cli("wait", str(step), "--timeout", "300ms", check=False)
    assert late.returncode == 5
    assert "step_1/late" in late.stderr
    told = json.loads(
        mount.cli("wait", model, str(step), "--timeout", "0", "--json", check=False).stdout
    )
    assert (told["reached"], told["unsaved_count"]) == (False, 1)
    durable = mount.status()["durable"]
    assert durable["tier"] == f"file://{disk.path}"
    assert durable["pending_bytes"] == 4
    assert "step_1/late" in mount.cli("status", str(mount.path)).stdout
    disk.come_back()
    mount.cli("persist", str(step), "--wait", "--timeout", "20s")
    assert (disk.path / "step_1" / "late").read_bytes() == b"late"


def test_a_command_outlives_the_worker(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk)
    disk.leave()
    (mount.path / "a").write_bytes(b"a")
    waiting = threading.Thread(
        target=lambda: done.append(
            mount.cli("wait", str(mount.path), "--timeout", "25s", check=False)
        )
    )
    done: list[subprocess.CompletedProcess[str]] = []
    waiting.start()
    time.sleep(1.0)  # it asks
    mount.wait_new_worker(mount.kill_worker())
    disk.come_back()
    mount.cli("persist", str(mount.path), "--wait", "--timeout", "20s")  # hurries
    waiting.join(25)
    assert done[0].returncode == 0, done[0].stderr
    assert (disk.path / "a").read_bytes() == b"a"


def test_a_mount_that_died_with_open_files(make_mount: MakeMount, disk: Disk) -> None:
    mount = durable_mount(make_mount, disk)
    (mount.path / "closed").write_bytes(b"c")
    mount.cli("wait", str(mount.path), "--timeout", "20s")
    held = os.open(mount.path / "held", os.O_WRONLY | os.O_CREAT)
    os.write(held, b"bytes")
    mount.kill_supervisor()
    try:
        refused = mount.cli("umount", str(mount.path), "--discard", check=False)
        assert refused.returncode == 6
        assert "held" in refused.stderr
    finally:
        with pytest.raises(OSError):
            os.close(held)
