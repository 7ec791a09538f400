"""Worker processes as the supervisor sees them: started, spoken to, and ended, each by its own pid.

What it keeps true:
- A worker is a pair of sockets: *fuse* carries FUSE messages, *link* carries short JSON messages
  (up: standby, serving, failed, pong; down: serve, ping). Both end with the process.
- A worker dies with its supervisor (its sockets end, and the kernel signals it).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from typing import Any

SOCKET_BUFFER_BYTES = 4 << 20
MESSAGE_BYTES = 1 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        for forced, usual in (
            (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
            (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
        ):
            try:
                end.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER_BYTES)
            except PermissionError:
                end.setsockopt(socket.SOL_SOCKET, usual, SOCKET_BUFFER_BYTES)
    ours.setblocking(False)
    return ours, theirs


class Worker:
    """One worker process. *control* is the listening control socket that it may serve."""

    def __init__(self, argv: list[str], settings: dict[str, Any], control: socket.socket) -> None:
        self.fuse, fuse = _pair()
        self.link, link = _pair()
        self.ready = False
        self.serving = False
        passed = (fuse.fileno(), link.fileno(), control.fileno())
        fds = {"fuse_fd": passed[0], "link_fd": passed[1], "control_fd": passed[2]}
        try:
            self._process = subprocess.Popen(
                [*argv, json.dumps(settings | fds | {"supervisor_pid": os.getpid()})],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        finally:
            fuse.close()
            link.close()
        self.pid = self._process.pid

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message; one that is dying will be noticed by its sockets."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.link.send(json.dumps(message).encode())

    def heard(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None when the process is gone."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = self.link.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionResetError:
                data = b""
            if not data:
                return messages or None
            messages.append(json.loads(data))

    def end(self) -> None:
        """Kill it (the index is made for that) and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it and close its sockets."""
        self.end()
        self.fuse.close()
        self.link.close()
