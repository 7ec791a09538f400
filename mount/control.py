"""The control socket: one JSON line asked, one or more answered, the last of them final. The owner's alone.

What it keeps true: nothing that arrives can stop the worker; a line has a bounded length, an answer a bounded number
of entries (the client asks again from a cookie), and there is a bounded number of clients. A client that says nothing
when it should ask, or does not take its answer, is dropped after `CLIENT_S`. A command that goes on for longer says so
every `TICK_S`, and ends when its client does.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import trio

from fs.errors import CkptfsError, FsError
from fs.types import BLOCK_BYTES, ROOT_INO, Attr
from fs.vfs import Vfs

log = logging.getLogger("ckptfs.control")

LINE_BYTES = 1 << 16
ANSWER_BYTES = 1 << 24
CLIENT_S = 10.0
TICK_S = 0.5
PAGE_ENTRIES = 1000
CLIENTS = 256
_GONE = (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError)


class Request(msgspec.Struct, omit_defaults=True):
    """A command, for a path relative to the mount.

    *after_cookie*: from where to go on. *timeout_s*: when to give up waiting; None: as the mount is set, or never.
    """

    command: str
    path: bytes = b""
    after_cookie: int = 0
    timeout_s: float | None = None
    recursive: bool = False
    until: str = "durable"


class FileReport(msgspec.Struct):
    """Where one file's bytes are. *since_ns*: since when its oldest change waits to be durable; 0: none does."""

    name: bytes
    kind: str
    ino: int
    size_bytes: int
    memory_bytes: int
    generation: int
    mtime_ns: int
    links: int
    state: str
    since_ns: int = 0
    digest: str = ""


class UnsavedReport(msgspec.Struct):
    """Something that is not durable. *state* "skipped": policy does not want it."""

    key: str
    size_bytes: int
    since_ns: int
    state: str
    reason: str


class FileResult(msgspec.Struct):
    """What a command found out about, or could not do with, one file (its path relative to the mount)."""

    path: bytes
    outcome: str
    text: str = ""
    size_bytes: int = 0


class Answer(msgspec.Struct, omit_defaults=True):
    """An error, or what the command has to tell. Not *final*: others follow.

    *timed_out*: it did not happen in time. *next_cookie*: from where to go on, 0: that was all.
    """

    error: str = ""
    final: bool = True
    status: dict[str, Any] = {}
    entries: list[FileReport] = []
    unsaved: list[UnsavedReport] = []
    results: list[FileResult] = []
    progress: dict[str, Any] = {}
    counts: dict[str, int] = {}
    next_cookie: int = 0
    timed_out: bool = False


class Job:
    """A command under way, as its client sees it. *look*: what to tell of it, asked every `TICK_S`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._one_at_a_time = trio.Lock()
        self.look: Callable[[], dict[str, Any]] = dict

    async def send(self, answer: Answer) -> None:
        """One line. Raises trio.TooSlowError when the client does not take it."""
        async with self._one_at_a_time:
            with trio.fail_after(CLIENT_S):
                await self._stream.send_all(msgspec.json.encode(answer) + b"\n")

    async def tell_until(self, done: trio.Event) -> None:
        """Progress, until the command is done; never cut off in the middle of a line."""
        while True:
            with trio.move_on_after(TICK_S):
                await done.wait()
            if done.is_set():
                return
            await self.send(Answer(final=False, progress=self.look()))


Quick = Callable[[Request], Answer | Awaitable[Answer]]
Long = Callable[[Request, Job], Awaitable[Answer]]


class DurableSide:
    """What a mount's durable tier adds: this is the one of a mount without a tier (see mount.durable_commands)."""

    LONG = ("wait", "persist", "evict", "prefetch", "verify", "drain")

    def quick_commands(self) -> dict[str, Quick]:
        """Commands that are answered at once."""
        return {"unsaved": self._no_tier}

    def long_commands(self) -> dict[str, Long]:
        """Commands that may take their time."""

        async def refuse(request: Request, job: Job) -> Answer:
            return self._no_tier(request)

        return dict.fromkeys(self.LONG, refuse)

    def _no_tier(self, request: Request) -> Answer:
        return Answer(error="this mount has no durable tier: mount with --durable URL to have one")

    def status(self) -> dict[str, Any] | None:
        """The section "durable" of the status."""
        return None

    def describe(self, attr: Attr) -> tuple[str, int, str] | None:
        """A file's state, since when it waits (ns; 0: it does not), and digest; None: say what is known without."""
        return None


class Control:
    """Answers for one vfs."""

    def __init__(self, vfs: Vfs, durable: DurableSide | None = None) -> None:
        self._vfs = vfs
        self._durable = durable or DurableSide()
        self._clients = trio.CapacityLimiter(CLIENTS)
        self._quick: dict[str, Quick] = {"status": self._status, "ls": self._ls}
        self._quick |= self._durable.quick_commands()
        self._long = self._durable.long_commands()

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        async with trio.open_nursery() as nursery:
            accepting = trio.socket.from_stdlib_socket(listener)
            while True:
                client, _ = await accepting.accept()
                nursery.start_soon(self._client, trio.SocketStream(client))

    async def _client(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                job = Job(stream)
                try:
                    self._clients.acquire_on_behalf_of_nowait(job)
                except trio.WouldBlock:
                    await job.send(Answer(error=f"{CLIENTS} commands are under way; try again"))
                    return
                try:
                    await self._talk(stream, job)
                finally:
                    self._clients.release_on_behalf_of(job)
        except* _GONE:
            pass

    async def _talk(self, stream: trio.SocketStream, job: Job) -> None:
        line = b""
        with trio.fail_after(CLIENT_S):
            while not line.endswith(b"\n"):
                data = await stream.receive_some(LINE_BYTES)
                line += data
                if not data or len(line) > LINE_BYTES:
                    return
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            await job.send(Answer(error=f"not understood: {error}"))
            return
        if request.command in self._long:
            await self._run(request, self._long[request.command], stream, job)
            return
        quick = self._quick.get(request.command)
        if quick is None:
            await job.send(Answer(error=f"unknown command {request.command!r}"))
            return
        await job.send(await self._answer(lambda: quick(request)))

    async def _run(
        self, request: Request, command: Long, stream: trio.SocketStream, job: Job
    ) -> None:
        async with trio.open_nursery() as watching:
            watching.start_soon(self._cancel_at_hangup, stream, watching.cancel_scope)
            done = trio.Event()
            async with trio.open_nursery() as telling:
                telling.start_soon(job.tell_until, done)
                answer = await self._answer(lambda: command(request, job))
                done.set()
            await job.send(answer)
            watching.cancel_scope.cancel()

    async def _cancel_at_hangup(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        while await stream.receive_some(LINE_BYTES):
            pass
        scope.cancel()

    async def _answer(self, command: Callable[[], Answer | Awaitable[Answer]]) -> Answer:
        try:
            answer = command()
            return answer if isinstance(answer, Answer) else await answer
        except _GONE:
            raise
        except FsError as error:
            return Answer(error=error.strerror or str(error))
        except CkptfsError as error:
            return Answer(error=str(error))
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.split(_GONE)[1] is None:
                raise
            log.exception("control command failed")
            return Answer(error=f"{type(error).__name__}: {error}; see the log")

    def _status(self, request: Request) -> Answer:
        space = self._vfs.space()
        files, directories = self._vfs.index.counts()
        arena = {
            "path": str(self._vfs.arena.root),
            "size_bytes": space.size_bytes,
            "used_bytes": space.used_bytes,
            "reserved_bytes": space.reserved_bytes,
            "free_bytes": space.free_bytes,
        }
        counts = {"files": files, "directories": directories}
        return Answer(status={"arena": arena} | counts | {"durable": self._durable.status()})

    async def _ls(self, request: Request) -> Answer:
        attr, name = await walk(self._vfs, request.path)
        if not stat.S_ISDIR(attr.mode):
            return Answer(entries=[self._report(name, attr)])
        await self._vfs.catalog.listed(attr.ino, request.after_cookie, PAGE_ENTRIES)
        rows = self._vfs.catalog.scan(attr.ino, request.after_cookie, PAGE_ENTRIES)
        entries = [self._report(row.name, self._vfs.getattr(row.attr.ino)) for row in rows]
        return Answer(
            entries=entries, next_cookie=rows[-1].cookie if len(rows) == PAGE_ENTRIES else 0
        )

    def _report(self, name: bytes, attr: Attr) -> FileReport:
        described = self._durable.describe(attr)
        if described is None:
            described = self._vfs.virtual_xattrs.state_of(attr), 0, ""
        state, since_ns, digest = described
        return FileReport(
            name=name,
            kind=kind_of(attr.mode),
            ino=attr.ino,
            size_bytes=attr.size,
            memory_bytes=attr.blocks * BLOCK_BYTES,
            generation=attr.generation,
            mtime_ns=attr.mtime_ns,
            links=attr.nlink,
            state=state,
            since_ns=since_ns,
            digest=digest,
        )


def kind_of(mode: int) -> str:
    """What sort of node this is, in a word."""
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


async def walk(vfs: Vfs, path: bytes) -> tuple[Attr, bytes]:
    """What lies at a path relative to the mount, and its name. Raises FsError ENOENT."""
    attr, name = vfs.getattr(ROOT_INO), b"."
    for part in path.split(b"/"):
        if part in (b"", b"."):
            continue
        found = await vfs.lookup(attr.ino, part) if stat.S_ISDIR(attr.mode) else None
        if found is None:
            raise FsError(2, f"no such file: {path.decode(errors='replace')}")
        attr, name = found, part
    return attr, name


def stream(path: Path, request: Request, silence_s: float = CLIENT_S) -> Iterator[Answer]:
    """Ask the worker behind a control socket; each of its answers, up to the final one.

    Raises CkptfsError when it does not, or cannot, answer: nothing for *silence_s*, or an error. Closing the iterator
    ends the command.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(silence_s)
            client.connect(os.fspath(path))
            client.sendall(msgspec.json.encode(request) + b"\n")
            rest = b""
            while True:
                line, rest = _next_line(client, rest, path)
                answer = msgspec.json.decode(line, type=Answer)
                if answer.error:
                    raise CkptfsError(answer.error)
                yield answer
                if answer.final:
                    return
    except TimeoutError as error:
        raise CkptfsError(
            f"{path}: no answer within {silence_s:.0f} s; is the worker hung?"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Unanswered(f"{path}: {error}") from error


class Unanswered(CkptfsError):
    """The worker went away; another one may answer."""


def _next_line(client: socket.socket, rest: bytes, path: Path) -> tuple[bytes, bytes]:
    pieces = [rest]
    length = len(rest)
    while b"\n" not in pieces[-1]:
        piece = client.recv(1 << 18)
        length += len(piece)
        if not piece or length > ANSWER_BYTES:
            raise Unanswered(f"{path}: the worker ended while answering; try again")
        pieces.append(piece)
    line, _, rest = b"".join(pieces).partition(b"\n")
    return line, rest


def ask(path: Path, request: Request, timeout_s: float = CLIENT_S) -> Answer:
    """The final answer alone. Raises CkptfsError when it does not, or cannot, answer."""
    *_, answer = stream(path, request, timeout_s)
    return answer
