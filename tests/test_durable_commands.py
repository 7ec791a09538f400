"""The control socket's commands about the durable tier, over a real socket, without a mount."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from fs.errors import CkptfsError
from fs.journal import State
from fs.tiers.memory import MemoryTier
from fs.tiers.tier import TierError, TierRefused
from fs.types import FH_INO_MASK
from mount import control
from mount.control import PAGE_ENTRIES, Control, FileResult
from tests.command_node import CommandNode
from tests.durable_node import MIB, OP, run


async def until(condition: object, timeout_s: float = 10.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 (nothing tells)
            await trio.sleep(0.01)


def outcomes(answers: list[control.Answer]) -> list[FileResult]:
    return [result for answer in answers for result in answer.results]


def test_wait_ends_when_all_below_is_durable(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            tier.plan.delay(0.7, "put", times=1)
            await node.mkdir("run")
            await node.write("run/a", b"a" * 1000)
            await node.write("run/b", b"b")
            answers = await node.all_answers("wait", "run", timeout_s=20.0)
            assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
            assert len(answers) > 1, "it took longer than a tick, and said nothing meanwhile"
            assert answers[0].progress["pending_rows"] >= 2
            assert not answers[-1].timed_out and not answers[-1].unsaved
            assert tier.head("run/a").size == 1000
            assert tier.head("run/b").size == 1
            again = await node.ask("wait", "run/a", timeout_s=0.0)
            assert not again.timed_out

    run(main)


def test_wait_that_times_out_says_what_and_why(tmp_path: Path) -> None:
    tier = MemoryTier()
    tier.plan.fail("put", times=-1, error=TierRefused("memory:run/: AccessDenied"))

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.mkdir("run")
            await node.write("run/a", b"aaaa")
            await node.write("other", b"")
            with trio.fail_after(5):
                answer = await node.ask("wait", "run", timeout_s=0.5)
            assert answer.timed_out
            assert answer.counts == {"unsaved": 2, "skipped": 0}
            by_key = {each.key: each for each in answer.unsaved}
            assert set(by_key) == {"run/", "run/a"}
            assert "AccessDenied" in by_key["run/"].reason
            assert "AccessDenied" in by_key["run/a"].reason  # it waits behind it
            assert by_key["run/a"].size_bytes == 4

    run(main)


def test_wait_refuses_what_policy_skips_and_persist_uploads_it(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        node.schedule.holds = lambda row: True
        async with node.serving():
            await node.mkdir("run")
            await node.write("run/a", b"a")
            with node.index.transaction():
                node.journal.skip(node.journal.at("run/a"), State.SKIPPED)
            answer = await node.ask("wait", "run")
            assert answer.counts["skipped"] == 1 and not answer.timed_out
            [skipped] = [each for each in answer.unsaved if each.state == "skipped"]
            assert skipped.key == "run/a"
            assert (await node.ask("persist", "run")).counts == {"changes": 2}
            answer = await node.ask("wait", "run", timeout_s=10.0)
            assert not answer.timed_out and not answer.unsaved
            assert tier.head("run/a").size == 1
            assert (await node.ask("persist", "run")).counts == {"changes": 0}

    run(main)


def test_wait_waits_for_writers_to_close(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        async with node.serving():
            fh, _ = await node.vfs.create(1, b"log", 0o644, os.O_WRONLY, OP)
            answer = await node.ask("wait", "log", timeout_s=0.3)
            assert answer.timed_out
            assert answer.unsaved[0].state == "writing"
            done = trio.Event()

            async def wait() -> None:
                assert not (await node.ask("wait", timeout_s=10.0)).timed_out
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.sleep(0.3)
                assert not done.is_set()
                node.store_bytes(fh & FH_INO_MASK, b"x")
                await node.vfs.flush(fh)
                await node.vfs.release(fh)
            assert node.tier.head("log").size == 1

    run(main)


def test_wait_until_local_and_of_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        node.schedule.holds = lambda row: True
        async with node.serving():
            await node.write("a", b"a")
            assert not (await node.ask("wait", "a", until="local")).timed_out
            for command in ("wait", "persist", "evict", "prefetch", "unsaved"):
                with pytest.raises(CkptfsError, match="no such file: a/b"):
                    await node.ask(command, "a/b")
            with pytest.raises(CkptfsError, match="replicated"):
                await node.ask("wait", "a", until="replicated")

    run(main)


def test_a_client_that_goes_ends_its_command(tmp_path: Path) -> None:
    tier = MemoryTier()
    tier.plan.fail("put", times=-1)

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.write("a", b"a")
            client = await trio.open_unix_socket(node.socket_path)
            await client.send_all(b'{"command":"drain","timeout_s":1000}\n')
            assert b'"final":false' in await client.receive_some()
            assert node.schedule.draining
            await client.aclose()
            await until(lambda: not node.schedule.draining)

    run(main)


def test_drain_lifts_what_policy_holds_and_puts_it_back(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        node.schedule.holds = lambda row: True
        async with node.serving():
            await node.mkdir("run")
            await node.write("run/a", b"a")
            await node.write("run/never", b"n")
            with node.index.transaction():
                node.journal.skip(node.journal.at("run/never"), State.SKIPPED)
            answer = await node.ask("drain", timeout_s=10.0)
            assert not answer.timed_out
            assert answer.counts == {"unsaved": 0, "skipped": 1}
            assert tier.head("run/a").size == 1
            assert not node.schedule.draining
            tier.plan.fail("put", times=-1, error=TierError("memory: 503 SlowDown"))
            await node.write("run/b", b"b")
            answer = await node.ask("drain", timeout_s=0.5)
            assert answer.timed_out
            assert answer.counts == {"unsaved": 1, "skipped": 1}
            [left] = [each for each in answer.unsaved if each.state != "skipped"]
            assert left.key == "run/b"
            assert "SlowDown" in left.reason
            assert not node.schedule.draining

    run(main)


def test_evict_says_why_something_stays(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        node.schedule.holds = lambda row: row.key == "run/held"
        async with node.serving():
            await node.mkdir("run")
            data = random.Random(1).randbytes(2 * MIB)
            ino = await node.write("run/whole", data)
            await node.write("run/open", b"o")
            await node.drained()
            await node.write("run/held", b"h")
            opened = await node.find("run/open")
            assert opened is not None
            fh = await node.vfs.open(opened.ino, os.O_RDONLY, OP)
            with pytest.raises(CkptfsError, match="-r"):
                await node.ask("evict", "run")
            answers = await node.all_answers("evict", "run", recursive=True)
            assert answers[-1].counts == {"evicted": 1, "evicted_bytes": 2 * MIB, "kept": 2}
            kept = {result.path: result.text for result in outcomes(answers)}
            assert set(kept) == {b"run/open", b"run/held"}
            assert "open" in kept[b"run/open"]
            assert "durable" in kept[b"run/held"]
            listed = {entry.name: entry.state for entry in (await node.ask("ls", "run")).entries}
            assert listed == {b"whole": "remote", b"open": "durable", b"held": "held"}
            attr = await node.find("run/whole")
            assert attr is not None and attr.size == 2 * MIB and attr.blocks == 0
            assert not (tmp_path / "arena" / "data" / str(ino)).exists()
            await node.vfs.release(fh)
            again = await node.ask("evict", "run/whole")
            assert again.counts["kept"] == 0

    run(main)


def test_prefetch_brings_the_same_bytes_back(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.mkdir("run")
            files = {f"run/{n}": random.Random(n).randbytes(n * 300_000 + 1) for n in range(8)}
            for path, data in files.items():
                await node.write(path, data)
            await node.drained()
            answer = await node.ask("evict", "run", recursive=True)
            assert answer.counts["evicted"] == 8
            answers = await node.all_answers("prefetch", "run")
            total = sum(map(len, files.values()))
            assert answers[-1].counts == {
                "files": 8, "bytes": total, "done": 8, "done_bytes": total, "failed": 0,
            }  # fmt: skip
            for path, data in files.items():
                attr = await node.find(path)
                assert attr is not None and attr.resident
                assert (tmp_path / "arena" / "data" / str(attr.ino)).read_bytes() == data
            assert (await node.ask("prefetch", "run")).counts["files"] == 0

    run(main)


def test_prefetch_names_what_cannot_be_fetched(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.mkdir("run")
            for name in ("gone", "there"):
                await node.write(f"run/{name}", name.encode() * 1000)
            await node.drained()
            await node.ask("evict", "run", recursive=True)
            tier.delete("run/gone")
            answers = await node.all_answers("prefetch", "run")
            assert (answers[-1].counts["done"], answers[-1].counts["failed"]) == (1, 1)
            [failed] = outcomes(answers)
            assert failed.path == b"run/gone"
            assert failed.text

    run(main)


class Comparing:
    """Compares what is in memory with what is in the tier, byte by byte."""

    node: CommandNode

    async def verify(self, ino: int, progress: object = None) -> Compared:
        [key] = self.node.paths.keys(ino)
        attr = self.node.index.attr(ino)
        assert attr is not None
        kept = bytearray(attr.size)
        self.node.tier.read_into(key, 0, memoryview(kept), None)
        here = (self.node.arena.root / "data" / str(ino)).read_bytes()
        return Compared("ok", "") if here == kept else Compared("damaged", "memory differs")


class Compared(NamedTuple):
    outcome: str
    text: str


def test_verify_tells_of_each_file(tmp_path: Path) -> None:
    async def main() -> None:
        comparing = Comparing()
        node = comparing.node = CommandNode(tmp_path, MemoryTier(), verifier=comparing)
        async with node.serving():
            await node.mkdir("run")
            for number in range(105):
                await node.write(f"run/{number}", b"%d" % number)
            await node.drained()
            bad = await node.find("run/17")
            assert bad is not None
            node.store_bytes(bad.ino, b"71")
            answers = await node.all_answers("verify", "run")
            assert answers[-1].counts["done"] == 105
            results = {result.path: result for result in outcomes(answers)}
            assert len(results) == 105
            assert [path for path, result in results.items() if result.outcome != "ok"] == [
                b"run/17"
            ]
            assert results[b"run/17"].text == "memory differs"

    run(main)


def test_status_and_ls_tell_of_the_tier(tmp_path: Path) -> None:
    tier = MemoryTier()
    refused = tier.plan.fail("put", times=-1, key="bad", error=TierRefused("memory:bad: no bucket"))

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.write("good", b"g" * 10)
            await node.drained()
            await node.write("bad", b"b" * 20)
            await until(lambda: node.store.caller.troubles)
            durable = (await node.ask("status")).status["durable"]
            assert durable["tier"] == "memory:"
            assert (durable["pending_rows"], durable["pending_bytes"]) == (1, 20)
            assert durable["committed_bytes"] == 10
            [trouble] = durable["troubles"]
            assert trouble["key"] == "bad"
            assert trouble["permanent"] and trouble["attempts"] >= 1
            assert "no bucket" in trouble["reason"]
            assert 0 <= trouble["age_s"] < 60
            assert 0 <= durable["oldest_age_s"] < 60
            entries = {entry.name: entry for entry in (await node.ask("ls")).entries}
            assert entries[b"good"].state == "durable" and entries[b"good"].since_ns == 0
            assert len(entries[b"good"].digest) == 32
            assert entries[b"bad"].state in ("local", "uploading") and entries[b"bad"].since_ns > 0
            refused.times = 0
            assert not (await node.ask("wait", timeout_s=10.0)).timed_out
            durable = (await node.ask("status")).status["durable"]
            assert durable["troubles"] == [] and durable["pending_rows"] == 0
            assert durable["retries"] >= 1

    run(main)


def test_unsaved_comes_in_pages(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        node.schedule.holds = lambda row: True
        async with node.serving():
            await node.mkdir("d")
            for number in range(PAGE_ENTRIES + 10):
                await node.write(f"d/{number}", b"")
            first = await node.ask("unsaved", "d")
            assert len(first.unsaved) == PAGE_ENTRIES and first.next_cookie
            second = await node.ask("unsaved", "d", after_cookie=first.next_cookie)
            keys = {each.key for each in first.unsaved + second.unsaved}
            assert keys == {f"d/{number}" for number in range(PAGE_ENTRIES + 10)} | {"d/"}
            assert second.next_cookie == 0
            assert {each.reason for each in second.unsaved} == {"the test holds it"}

    run(main)


def test_without_a_durable_tier(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        node.control = Control(node.vfs)
        async with node.serving():
            await node.write("a", b"a")
            assert (await node.ask("status")).status["durable"] is None
            for command in ("wait", "persist", "evict", "prefetch", "verify", "drain", "unsaved"):
                with pytest.raises(CkptfsError, match="no durable tier"):
                    await node.ask(command, "a")

    run(main)


def test_nothing_a_client_sends_stops_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_S", 0.3)

    def talk(path: Path, data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(5)
            client.connect(str(path))
            heard = b""
            try:
                client.sendall(data)
                while piece := client.recv(1 << 16):
                    heard += piece
            except (BrokenPipeError, ConnectionResetError):
                pass
            return heard

    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        async with node.serving():
            for data, said in (
                (b"\n", b"not understood"),
                (b'{"command":"wait","timeout_s":"x"}\n', b"not understood"),
                (b'{"command":"nothing"}\n', b"unknown command"),
                (b'{"command":"unsaved","after_cookie":-5}\n', b"{}"),
                (b'{"command":"drain","timeout_s":-1}\n', b"counts"),
                (b"x" * (control.LINE_BYTES + 10), b""),
                (b'{"command":"st', b""),
            ):
                heard = await trio.to_thread.run_sync(talk, node.socket_path, data)
                assert said in heard if said else heard == b"", (data[:40], heard)
            assert (await node.ask("status")).status["files"] == 0

    run(main)


def test_ls_of_a_file_tells_its_digest(tmp_path: Path) -> None:
    async def main() -> None:
        tier = MemoryTier()
        node = CommandNode(tmp_path, tier)
        async with node.serving():
            await node.write("a", b"content")
            await node.drained()
            [entry] = (await node.ask("ls", "a")).entries
            assert entry.digest == tier.head("a").meta["ckptfs-xxh3-128"]

    run(main)
