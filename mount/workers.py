"""Worker processes as the supervisor sees them: started, spoken to, and ended, each by its own pid.

What it keeps true:
- *link* carries short JSON messages (up: standby, opened, failed, serving, pong, drained; down: open, serve with
  the device's descriptor, ping, drain). It ends with the process.
- A worker dies with its supervisor (the link ends, and the kernel signals it).
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


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair that keeps messages whole; the first end does not block."""
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
        self.link, link = seqpacket_pair()
        self.ready = False
        self.serving = False
        passed = (link.fileno(), control.fileno())
        fds = {"link_fd": passed[0], "control_fd": passed[1]}
        try:
            self._process = subprocess.Popen(
                [*argv, json.dumps(settings | fds | {"supervisor_pid": os.getpid()})],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        finally:
            link.close()
        self.pid = self._process.pid

    def tell(self, message: dict[str, Any], *fds: int) -> None:
        """Send a message, and descriptors; a worker that is dying will be noticed by its link."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.link, [json.dumps(message).encode()], list(fds))

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
        """End it and close its link."""
        self.end()
        self.link.close()
