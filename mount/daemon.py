"""The worker process: pyfuse3 on trio over one vfs. Started and, at any moment, killed by the supervisor.

What it keeps true: everything is imported before it says "standby"; nothing of the arena or the index is
touched before it is told to serve, so two workers never hold the index together; it ends when its
supervisor does.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog, Fault, no_fault
from fs.content import Content
from fs.errors import CkptfsError, IndexDamaged
from fs.fuse_ops import FuseOps
from fs.index import Index
from fs.vfs import Vfs
from mount.control import Control

log = logging.getLogger("ckptfs.worker")

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 20


def _end_with(supervisor_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        sys.exit("the supervisor ended before its worker began")


def _faults(directory: Path) -> Fault:
    """Faults for tests: the file "fault" names a point, at which this process is killed.

    "POINT" once, "hang POINT" once (stops answering), "always POINT" each time.
    """
    order = directory / "fault"

    def fault(point: str) -> None:
        words = order.read_text().split() if order.exists() else []
        if not words or words[-1] != point:
            return
        if words[0] != "always":
            order.unlink()
        if words[0] == "hang":
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    return fault


def open_vfs(settings: dict[str, Any], order: dict[str, Any]) -> Vfs:
    """Index, catalog, content and arena, recovered. Raises CkptfsError when they cannot be trusted."""
    fault = _faults(Path(settings["index"])) if settings["faults"] else no_fault
    fault("start")
    index = Index(Path(settings["index"]) / "index.sqlite", check=order["fresh"])
    arena = Arena(Path(settings["arena"]), size_bytes=settings["bound_bytes"])
    vfs = Vfs(index, EmbeddedCatalog(index, fault), Content(arena), fault)
    handles = [(fh, count) for fh, count in order["opens"]]
    vfs.recover(handles, fresh_mount=order["fresh"])
    return vfs


class Link:
    """This end of the socket to the supervisor."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._socket.send(json.dumps(message).encode())

    def wait_order(self) -> dict[str, Any]:
        """Block until told to serve."""
        self._socket.setblocking(True)
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            sys.exit(0)
        return dict(json.loads(data))

    async def answer_pings(self) -> None:
        """A pong shows that the event loop turns. Ends the process when the supervisor is gone."""
        self._socket.setblocking(False)
        link = trio.socket.from_stdlib_socket(self._socket)
        while data := await link.recv(MESSAGE_BYTES):
            if json.loads(data)["type"] == "ping":
                await link.send(json.dumps({"type": "pong"}).encode())
        os._exit(0)


async def _serve(vfs: Vfs, link: Link, control: socket.socket) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.answer_pings)
        nursery.start_soon(Control(vfs).serve, control)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> None:
    """Entry point: settings as one JSON argument."""
    settings = json.loads(sys.argv[1])
    _end_with(settings["supervisor_pid"])
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the foreground is the supervisor's
    link = Link(settings["link_fd"])
    control = socket.socket(fileno=settings["control_fd"])
    gc.collect()
    gc.freeze()
    link.say(type="standby")
    order = link.wait_order()
    while order["type"] != "serve":
        order = link.wait_order()
    try:
        vfs = open_vfs(settings, order)
    except IndexDamaged as error:
        advice = "nothing was changed; repair it, or begin anew and keep it with --set-aside"
        link.say(type="failed", error=f"{error}; {advice}")
        sys.exit(1)
    except (CkptfsError, OSError, sqlite3.Error) as error:
        link.say(type="failed", error=str(error))
        sys.exit(1)
    pyfuse3.init(FuseOps(vfs), f"/dev/fd/{settings['fuse_fd']}", {"default_permissions"})
    link.say(type="serving")
    try:
        trio.run(_serve, vfs, link, control)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
