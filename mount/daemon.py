"""The worker process: pyfuse3 on trio over one vfs. Started and, at any moment, killed by the supervisor.

What it keeps true: everything is imported before it says "standby"; nothing of the arena or the index is
touched before it is told to serve, so two workers never hold the index together; it ends when its
supervisor does.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyfuse3
import trio

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog, Fault, no_fault
from fs.content import Content
from fs.errors import CkptfsError, IndexDamaged
from fs.fuse_ops import FuseOps
from fs.index import Index
from fs.opentable import OpenTable
from fs.reconcile import leave_untracked
from fs.suspended import Suspended
from fs.vfs import Vfs
from mount.backing import Backings
from mount.budget import Budget
from mount.control import Control
from mount.durable import NodeDurable
from mount.durable_commands import DurableCommands
from mount.session import Session
from mount.turns import TrioForPyfuse3

log = logging.getLogger("ckptfs.worker")

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 20
SWEEP_S = 5.0


def _end_with(supervisor_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        sys.exit("the supervisor ended before its worker began")


def _faults(directory: Path) -> Fault:
    """Faults for tests: the file "fault" names a point, at which this process is killed.

    "POINT" once, "hang POINT" once (stops answering), "always POINT" each time, "nth N PREFIX" once at the N-th
    point (from 1) that begins with PREFIX.
    """
    order = directory / "fault"
    passed = itertools.count(1)

    def fault(point: str) -> None:
        words = order.read_text().split() if order.exists() else []
        if len(words) == 3 and words[0] == "nth":
            if not point.startswith(words[2]) or next(passed) != int(words[1]):
                return
        elif not words or words[-1] != point:
            return
        if words[0] != "always":
            order.unlink()
        if words[0] == "hang":
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    return fault


class Opened(NamedTuple):
    """What a worker serves; the durable side and its commands are None without a durable tier."""

    vfs: Vfs
    durable: NodeDurable | None
    commands: DurableCommands | None


def open_vfs(settings: dict[str, Any], table: OpenTable, *, fresh: bool) -> Opened:
    """Index, catalog, content and arena, recovered. Raises CkptfsError when they cannot be trusted."""
    directory = Path(settings["index"])
    fault = _faults(directory) if settings["faults"] else no_fault
    fault("start")
    index = Index(directory / "index.sqlite", check=fresh)
    arena = Arena(Path(settings["arena"]), size_bytes=settings["bound_bytes"])
    content = Content(arena)
    if settings["durable"] is None:
        leave_untracked(index)
        vfs = Vfs(index, EmbeddedCatalog(index, fault), content, fault)
        vfs.recover(table.opens(), fresh_mount=fresh)
        return Opened(vfs, None, None)
    durable = NodeDurable(settings["durable"], index, arena, content, fault, fresh=fresh)
    catalog = durable.catalog(EmbeddedCatalog(index, fault, durable.recorder))
    vfs = Vfs(index, catalog, content, fault, durable.residence)
    vfs.recover(table.opens(), fresh_mount=fresh)
    return Opened(vfs, durable, durable.attach(vfs))


def open_session(
    settings: dict[str, Any], table: OpenTable, device_fd: int, opened: Opened
) -> Session:
    """The connection to the kernel; taken over when a worker served it before."""
    data_fd = os.open(Path(settings["arena"]) / "data", os.O_RDONLY | os.O_DIRECTORY)
    bound, durable = settings["bound_bytes"], opened.durable
    fresh = not table.init_request
    backings = Backings(device_fd, data_fd, table, Budget(data_fd, bound) if bound else None)
    session = Session(
        device_fd,
        table,
        backings,
        passthrough=settings["passthrough"],
        resend=not settings["no_resend"],
        open_refused=opened.vfs.content.released,
        suspended=None if durable is None else Suspended(Path(settings["index"]), fresh=fresh),
        elsewhere=None if durable is None else durable.residence.fetcher,
    )
    if not fresh:
        session.take_over()
    return session


class Link:
    """This end of the socket to the supervisor."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self.commands: DurableCommands | None = None

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._socket.send(json.dumps(message).encode())

    def wait_for(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        """Block until told *kind*: the message and the descriptors with it."""
        self._socket.setblocking(True)
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            if not data:
                sys.exit(0)
            message = json.loads(data)
            if message["type"] == kind:
                return message, fds

    async def answer_pings(self) -> None:
        """A pong shows that the event loop turns. Ends the process when the supervisor is gone."""
        self._socket.setblocking(False)
        link = trio.socket.from_stdlib_socket(self._socket)
        async with trio.open_nursery() as nursery:
            while data := await link.recv(MESSAGE_BYTES):
                message = json.loads(data)
                if message["type"] == "ping":
                    await link.send(json.dumps({"type": "pong"}).encode())
                elif message["type"] == "drain":
                    nursery.start_soon(self._drain, message["timeout_s"])
            os._exit(0)

    async def _drain(self, timeout_s: float) -> None:
        left = 0
        if self.commands is not None:
            left = await self.commands.drainer.before_the_end(timeout_s)
        self.say(type="drained", left=left)


async def _serve(opened: Opened, session: Session, link: Link, control: socket.socket) -> None:
    vfs = opened.vfs
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.answer_pings)
        nursery.start_soon(session.pass_late_replies)
        if opened.durable is not None:
            link.commands = opened.commands
            await opened.durable.start(nursery)
        nursery.start_soon(Control(vfs, opened.commands).serve, control)
        nursery.start_soon(_announce, session, link)
        nursery.start_soon(_sweep, vfs)
        # a catalog that answers at once needs no second task, and is faster without
        await pyfuse3.main(max_tasks=99 if vfs.catalog.may_wait else 1)
        nursery.cancel_scope.cancel()


async def _announce(session: Session, link: Link) -> None:
    await session.serving.wait()
    link.say(type="serving", lane=session.lane, why_plain=session.why_plain())


async def _sweep(vfs: Vfs) -> None:
    while True:
        await trio.sleep(SWEEP_S)
        vfs.sweep()


def main() -> None:
    """Entry point: settings as one JSON argument."""
    settings = json.loads(sys.argv[1])
    _end_with(settings["supervisor_pid"])
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    # a service manager signals the whole group: the supervisor says when the worker's time has come
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the foreground is the supervisor's
    link = Link(settings["link_fd"])
    control = socket.socket(fileno=settings["control_fd"])
    gc.collect()
    gc.freeze()
    link.say(type="standby")
    order, _ = link.wait_for("open")
    try:
        table = OpenTable(Path(settings["index"]), fresh=order["fresh"])
        opened = open_vfs(settings, table, fresh=order["fresh"])
    except IndexDamaged as error:
        advice = "nothing was changed; repair it, or begin anew and keep it with --set-aside"
        link.say(type="failed", error=f"{error}; {advice}")
        sys.exit(1)
    except (CkptfsError, OSError, sqlite3.Error) as error:
        link.say(type="failed", error=str(error))
        sys.exit(1)
    link.say(type="opened")
    _, (device_fd,) = link.wait_for("serve")
    session = open_session(settings, table, device_fd, opened)
    pyfuse3.trio = TrioForPyfuse3(session)  # type: ignore[attr-defined]
    pyfuse3.init(FuseOps(opened.vfs), f"/dev/fd/{session.theirs.fileno()}", {"default_permissions"})
    try:
        trio.run(_serve, opened, session, link, control)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
