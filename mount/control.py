"""The control socket: one JSON line asked, one answered. The owner's alone (mode 0600 in a 0700 directory).

What it keeps true: nothing that arrives can stop the worker; a line has a bounded length, a client a
bounded time, and an answer a bounded number of entries (the client asks again from a cookie).
"""

from __future__ import annotations

import logging
import socket
import stat
from collections.abc import Callable
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
PAGE_ENTRIES = 1000


class Request(msgspec.Struct):
    """What may be asked: "status", or "ls" of a path relative to the mount from behind a cookie."""

    command: str
    path: bytes = b""
    after_cookie: int = 0


class FileReport(msgspec.Struct):
    """Where one file's bytes are."""

    name: bytes
    kind: str
    ino: int
    size_bytes: int
    memory_bytes: int
    generation: int
    mtime_ns: int
    links: int
    state: str


class Answer(msgspec.Struct, omit_defaults=True):
    """One of: an error; status fields; entries with a cookie to go on from (0: that was all)."""

    error: str = ""
    status: dict[str, Any] = {}
    entries: list[FileReport] = []
    next_cookie: int = 0


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


class Control:
    """Answers for one vfs."""

    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._commands: dict[str, Callable[[Request], Any]] = {
            "status": self._status,
            "ls": self._ls,
        }

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        async with trio.open_nursery() as nursery:
            accepting = trio.socket.from_stdlib_socket(listener)
            while True:
                client, _ = await accepting.accept()
                nursery.start_soon(self._client, trio.SocketStream(client))

    async def _client(self, stream: trio.SocketStream) -> None:
        try:
            with trio.fail_after(CLIENT_S):
                async with stream:
                    line = b""
                    while not line.endswith(b"\n"):
                        data = await stream.receive_some(LINE_BYTES)
                        line += data
                        if not data or len(line) > LINE_BYTES:
                            return
                    await stream.send_all(msgspec.json.encode(await self._answer(line)) + b"\n")
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
            command = self._commands.get(request.command)
            if command is None:
                return Answer(error=f"unknown command {request.command!r}")
            answer = command(request)
            return answer if isinstance(answer, Answer) else await answer
        except msgspec.DecodeError as error:
            return Answer(error=f"not understood: {error}")
        except FsError as error:
            return Answer(error=error.strerror or str(error))
        except Exception as error:
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
        return Answer(status={"arena": arena, "files": files, "directories": directories})

    async def _ls(self, request: Request) -> Answer:
        attr, name = await self._walk(request.path)
        if not stat.S_ISDIR(attr.mode):
            return Answer(entries=[self._report(name, attr)])
        rows = self._vfs.catalog.scan(attr.ino, request.after_cookie, PAGE_ENTRIES)
        entries = [self._report(row.name, self._vfs.getattr(row.attr.ino)) for row in rows]
        return Answer(
            entries=entries, next_cookie=rows[-1].cookie if len(rows) == PAGE_ENTRIES else 0
        )

    async def _walk(self, path: bytes) -> tuple[Attr, bytes]:
        attr, name = self._vfs.getattr(ROOT_INO), b"."
        for part in path.split(b"/"):
            if part in (b"", b"."):
                continue
            found = await self._vfs.lookup(attr.ino, part)
            if found is None:
                raise FsError(2, f"no such file: {path.decode(errors='replace')}")
            attr, name = found, part
        return attr, name

    def _report(self, name: bytes, attr: Attr) -> FileReport:
        writing = self._vfs.content.has_writers(attr.ino)
        in_memory = attr.blocks * BLOCK_BYTES
        return FileReport(
            name=name,
            kind=_kind(attr.mode),
            ino=attr.ino,
            size_bytes=attr.size,
            memory_bytes=in_memory,
            generation=attr.generation,
            mtime_ns=attr.mtime_ns,
            links=attr.nlink,
            state="" if not stat.S_ISREG(attr.mode) else "writing" if writing else "local",
        )


def ask(path: Path, request: Request, timeout_s: float = CLIENT_S) -> Answer:
    """Ask the worker behind a control socket. Raises CkptfsError when it does not, or cannot, answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(path))
            client.sendall(msgspec.json.encode(request) + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                piece = client.recv(1 << 18)
                if not piece or len(data) > ANSWER_BYTES:
                    raise CkptfsError(f"{path}: the worker ended while answering; try again")
                data += piece
        answer = msgspec.json.decode(data, type=Answer)
    except TimeoutError as error:
        raise CkptfsError(
            f"{path}: no answer within {timeout_s:.0f} s; is the worker hung?"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise CkptfsError(f"{path}: {error}") from error
    if answer.error:
        raise CkptfsError(answer.error)
    return answer
