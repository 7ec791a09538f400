"""The supervisor: owns the mount, relays FUSE messages to a worker, and outlives workers.

    kernel <-- /dev/fuse --> this process <-- SEQPACKET --> worker (and one standby, imported and waiting)

What it keeps true:
- No application sees a worker die. While one is replaced the device is not read; then INIT is replayed to
  the new worker, and what the old one owed is sent again, marked, so that it is not executed twice.
- A worker whose event loop does not answer, or that sits on one request for too long, is killed. A request
  that has cost several workers is answered EIO; and when no worker can be had at all, requests are answered
  EIO after a while: nothing hangs for ever.
- Bytes of open files do not depend on a worker: the kernel moves them (passthrough), or this process does.

Standard library only, one thread and one epoll: it must be read in one sitting and have no reason to die.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from fs import relay
from mount import fusedev, sysmount
from mount.backing import Backings
from mount.budget import Budget
from mount.workers import Worker

log = logging.getLogger("ckptfs.supervisor")

TICK_S = 0.5
BURST = 16  # messages of one side before the other gets its turn
DRAIN_S = 1.0  # how long a planned swap waits for what the worker owes
START_S = 120.0  # a first start looks at every backing file
TAKEOVER_S = 20.0
RETRY_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


class Refused(Exception):
    """The mount cannot be had; the text says why."""


class Supervisor:
    """Settings: see mount.daemon.SupervisorSettings (they arrive as one JSON argument)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.run_dir = Path(settings["run_dir"])
        data_fd = os.open(Path(settings["arena"]) / "data", os.O_RDONLY | os.O_DIRECTORY)
        bound = settings["bound_bytes"]
        self.backings = Backings(data_fd, Budget(data_fd, bound) if bound else None)
        self.ledger = relay.Ledger()
        self.epoll = select.epoll()
        self.control = self._listen()
        self.wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.fuse_fd = -1
        self.offer = relay.Offer(False, False)
        self.init_request = b""
        self.init_unique: int | None = None  # replayed INIT whose reply is to be swallowed
        self.worker: Worker | None = None
        self.standby: Worker | None = None
        self.backlog: deque[bytes] = deque()
        self.reading = False
        self.restarts = 0
        self.failures = 0
        self.retry_at_s: float | None = None
        self.down_since_s: float | None = None
        self.mounted = False
        self.dead_since_s: float | None = None
        self.last_pong_s = 0.0
        self.worker_deadline_s: float | None = None
        self.restart_wanted = False
        self.drain_until_s: float | None = None
        self.stop_until_s: float | None = None
        self.ready_fd: int | None = settings["ready_fd"]
        self.request_buffer = bytearray(relay.READ_BUFFER_BYTES)
        self.reply_buffer = bytearray(relay.READ_BUFFER_BYTES)

    def _listen(self) -> socket.socket:
        path = self.run_dir / "control.sock"
        path.unlink(missing_ok=True)
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.bind(os.fspath(path))
        path.chmod(0o600)
        control.listen(64)
        control.setblocking(False)
        return control

    # start

    def run(self) -> int:
        """Mount and serve until unmounted; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # noticed through the wakeup pipe
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.epoll.register(self.wakeup, select.EPOLLIN)
        try:
            self._first_worker()
            self.fuse_fd = fusedev.open_and_mount(self.settings)
        except (Refused, OSError) as error:
            self._tell_starter({"error": _words(error)})
            log.error("not mounted: %s", _words(error))
            self._end_workers()
            return 1
        self.backings.fuse_fd = self.fuse_fd
        self.epoll.register(self.fuse_fd, 0)
        self._read_device(True)
        return self._loop()

    def _first_worker(self) -> None:
        worker = self.worker = self._spawn()
        self._serve_next(fresh=True)
        deadline_s = time.monotonic() + START_S
        while not worker.serving:
            for fd, _ in self.epoll.poll(TICK_S):
                if fd == worker.link.fileno():
                    messages = worker.heard()
                    if messages is None:
                        raise Refused(f"the worker ended at its start; see {self.run_dir / 'log'}")
                    for message in messages:
                        if message["type"] == "failed":
                            raise Refused(message["error"])
                        worker.serving |= message["type"] == "serving"
                elif fd == self.wakeup and _stop_wanted(self._signals()):
                    raise Refused("interrupted")
            if time.monotonic() > deadline_s:
                raise Refused(f"the worker did not answer within {START_S:.0f} s")

    def _tell_starter(self, message: dict[str, Any]) -> None:
        if self.ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.ready_fd, json.dumps(message).encode())
            os.close(self.ready_fd)
            self.ready_fd = None

    def _spawn(self) -> Worker:
        worker = Worker(self.settings["worker_argv"], self.settings["worker"], self.control)
        self.epoll.register(worker.link, select.EPOLLIN)
        return worker

    def _save_state(self) -> None:
        state = {
            "name": self.settings["name"],
            "mountpoint": self.settings["mountpoint"],
            "arena": self.settings["arena"],
            "lane": "passthrough" if self.backings.passthrough else "plain",
            "supervisor_pid": os.getpid(),
            "worker_pid": self.worker.pid if self.worker and self.worker.serving else None,
            "standby_pid": self.standby.pid if self.standby and self.standby.ready else None,
            "worker_restarts": self.restarts,
        }
        fresh = self.run_dir / "state.json.new"
        fresh.write_text(json.dumps(state))
        fresh.rename(self.run_dir / "state.json")

    # loop

    def _loop(self) -> int:
        next_tick_s = 0.0
        while True:
            for fd, events in self.epoll.poll(TICK_S):
                if fd == self.fuse_fd:
                    if events & (select.EPOLLERR | select.EPOLLHUP) or not self._requests():
                        return self._finish()
                elif fd == self.wakeup:
                    self._signalled(self._signals())
                elif self.worker and fd == self.worker.fuse.fileno():
                    self._worker_ready(events)
                else:
                    self._link_ready(fd)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                # a late tick means that we were stopped, not that the worker is
                late = now_s - next_tick_s > 2 * TICK_S and next_tick_s > 0
                next_tick_s = now_s + TICK_S
                self._tick(now_s, late=late)
                if self.stop_until_s is not None and now_s > self.stop_until_s:
                    log.warning(
                        "still in use at the end of the grace period; users will see errors"
                    )
                    return self._finish()

    def _read_device(self, on: bool) -> None:
        if on != self.reading:
            self.reading = on
            self.epoll.modify(self.fuse_fd, select.EPOLLIN if on else 0)

    def _requests(self) -> bool:
        """Pass on what the kernel asks; False when the mount is gone."""
        for _ in range(BURST):
            if not self.reading:
                break
            try:
                size = os.readv(self.fuse_fd, [self.request_buffer])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return False
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            self._request(size)
        return True

    def _request(self, size: int) -> None:
        buffer = self.request_buffer
        _, opcode, unique, _ = relay.REQUEST_HEADER.unpack_from(buffer)
        if opcode in relay.LOCAL and self.backings.serves(opcode, buffer):
            request = memoryview(buffer)[:size]
            self.backings.serve(opcode, unique, request, self.reply_buffer)
            return
        if self.ledger.poisonous(unique):
            log.error("request %d (opcode %d) has cost several workers: EIO", unique, opcode)
            self.ledger.forgive(unique)
            self.backings.send(relay.error_reply(unique, errno.EIO))
            return
        relay.number_request(buffer, unique)
        if opcode == relay.TMPFILE:
            message: bytes | memoryview = relay.tmpfile_as_create(memoryview(buffer)[:size])
            opcode = relay.CREATE
        else:
            if opcode in (relay.READDIR, relay.READDIRPLUS):
                relay.bound_readdir(buffer)
            message = memoryview(buffer)[:size]
        if opcode not in relay.UNANSWERED:
            self._owe(opcode, unique, message)
        if self.down_since_s is not None:
            self._fail_owed()
        else:
            self._push(message)

    def _owe(self, opcode: int, unique: int, message: bytes | memoryview) -> None:
        if opcode == relay.INIT:
            self.init_request = bytes(message)
            self.offer = relay.parse_offer(self.init_request)
            if self.settings["keep_copies"]:
                self.offer = self.offer._replace(resend=False)
        access = relay.open_access(opcode, memoryview(message))
        fh = relay.fh_of(memoryview(message)) if opcode == relay.RELEASE else 0
        copy = None if self.offer.resend else bytes(message)
        self.ledger.add(unique, relay.Owed(opcode, access, fh, time.monotonic(), copy))

    def _push(self, message: bytes | memoryview) -> None:
        assert self.worker is not None
        if not self.backlog:
            try:
                self.worker.fuse.send(message)
                return
            except BlockingIOError:
                self.epoll.modify(self.worker.fuse, select.EPOLLIN | select.EPOLLOUT)
                self._read_device(False)
            except (BrokenPipeError, ConnectionResetError):
                return  # dying: its death will be noticed, and this is in the ledger
        self.backlog.append(bytes(message))

    # replies

    def _worker_ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush_backlog()
        if events & ~select.EPOLLOUT and not self._replies():
            self._worker_died()

    def _flush_backlog(self) -> None:
        assert self.worker is not None
        while self.backlog:
            try:
                self.worker.fuse.send(self.backlog[0])
            except OSError:
                return
            self.backlog.popleft()
        self.epoll.modify(self.worker.fuse, select.EPOLLIN)
        if self.drain_until_s is None:
            self._read_device(True)

    def _replies(self, burst: int = BURST) -> bool:
        """Pass on what the worker answers; False at its end."""
        assert self.worker is not None
        for _ in range(burst):
            try:
                size = self.worker.fuse.recv_into(self.reply_buffer)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if size == 0:
                return False
            self._reply(size)
        return True

    def _reply(self, size: int) -> None:
        buffer = self.reply_buffer
        _, error, unique = relay.REPLY_HEADER.unpack_from(buffer)
        if unique == self.init_unique:
            self._taken_over()
            return
        owed = self.ledger.settle(unique) if unique else None
        if owed is None:
            if unique == 0:  # a notification
                self.backings.send(memoryview(buffer)[:size])
            return
        granted = 0
        if owed.opcode in (relay.OPEN, relay.CREATE) and not error:
            granted = self._grant(owed, buffer)
            if not granted:
                self.backings.send(relay.error_reply(unique, errno.EIO))
                return
        elif owed.opcode == relay.INIT and not error:
            may = self.settings["passthrough"] and self.offer.passthrough
            relay.patch_init_reply(buffer, self.offer, passthrough=may)
        elif owed.opcode == relay.RELEASE:
            self.backings.release(owed.fh)
        if not self.backings.send(memoryview(buffer)[:size]) and granted:
            self.backings.release(granted)
        if owed.opcode == relay.INIT:
            self._mounted()

    def _grant(self, owed: relay.Owed, buffer: bytearray) -> int:
        parsed = relay.parse_open_reply(owed.opcode, buffer)
        try:
            backing_id = self.backings.grant(parsed.fh)
        except OSError as error:
            log.error("backing file of handle %#x: %s", parsed.fh, error)
            return 0
        relay.patch_open_reply(buffer, parsed, owed.access, backing_id)
        return parsed.fh

    def _mounted(self) -> None:
        if self.settings["passthrough"] and self.offer.passthrough:
            probe = os.open(Path(self.settings["arena"]) / "clock", os.O_RDWR)
            self.backings.passthrough = self.backings.probe(probe)
            os.close(probe)
        lane = "passthrough" if self.backings.passthrough else "plain"
        if self.settings["require_passthrough"] and lane == "plain":
            why = "the kernel offers none (Linux 6.9 needed)"
            if self.offer.passthrough:
                why = "registering a backing file was refused (CAP_SYS_ADMIN needed)"
            self._tell_starter({"error": f"passthrough is required, but {why}"})
            self.stop_until_s = time.monotonic()
            self._unmount()
            return
        log.info(
            "mounted %s on %s (%s lane)", self.settings["name"], self.settings["mountpoint"], lane
        )
        self.mounted = True
        self.worker_deadline_s = None
        self.last_pong_s = time.monotonic()
        self.standby = self._spawn()
        self._save_state()
        self._tell_starter({"lane": lane})

    # workers come and go

    def _link_ready(self, fd: int) -> None:
        for worker in (self.worker, self.standby):
            if worker is not None and worker.link.fileno() == fd:
                messages = worker.heard()
                if messages is None:
                    self._link_ended(worker)
                for message in messages or []:
                    self._heard(worker, message)
                return

    def _link_ended(self, worker: Worker) -> None:
        if worker is self.worker:
            self._worker_died()
            return
        log.warning("the standby worker %d ended", worker.pid)
        self._drop(worker)
        self.standby = None
        self._save_state()

    def _heard(self, worker: Worker, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "pong":
            self.last_pong_s = time.monotonic()
        elif kind == "standby":
            worker.ready = True
            self._save_state()
        elif kind == "serving" and worker is self.worker and not worker.serving:
            worker.serving = True
            self.init_unique = relay.REQUEST_HEADER.unpack_from(self.init_request)[2]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.fuse.send(self.init_request)
        elif kind == "failed":
            log.error("worker %d cannot serve: %s", worker.pid, message["error"])

    def _drop(self, worker: Worker) -> None:
        for end in (worker.fuse, worker.link):
            with contextlib.suppress(OSError, ValueError):
                self.epoll.unregister(end)
        worker.close()

    def _worker_died(self) -> None:
        worker = self.worker
        assert worker is not None
        self._read_device(False)
        worker.end()
        while self._replies():  # whole replies may still lie in the socket
            pass
        self._read_device(False)
        self._drop(worker)
        self.worker = None
        self.backlog.clear()
        self.init_unique = self.worker_deadline_s = self.drain_until_s = None
        lost = self.ledger.worker_died()
        if not self.mounted:
            self._tell_starter(
                {"error": f"the worker died at its start; see {self.run_dir / 'log'}"}
            )
            self._unmount()
            return
        self.restarts += 1
        self.failures += 1
        now_s = time.monotonic()
        self.dead_since_s = self.dead_since_s or now_s
        delay_s = 0.0 if self.standby else RETRY_S[min(self.failures - 1, len(RETRY_S) - 1)]
        self.retry_at_s = now_s + delay_s
        log.warning("worker %d is gone, %d requests open", worker.pid, lost)
        if delay_s == 0:
            self._take_over()

    def _take_over(self) -> None:
        self.retry_at_s = None
        self.worker = self.standby or self._spawn()
        self.standby = None
        self._serve_next(fresh=False)

    def _serve_next(self, *, fresh: bool) -> None:
        worker = self.worker
        assert worker is not None
        self.epoll.register(worker.fuse, select.EPOLLIN)
        self.worker_deadline_s = time.monotonic() + TAKEOVER_S
        worker.tell({"type": "serve", "fresh": fresh, "opens": self.backings.granted()})

    def _taken_over(self) -> None:
        """The new worker has answered INIT: give it what the last one owed."""
        self.init_unique = self.worker_deadline_s = None
        self.dead_since_s = self.down_since_s = None
        self.failures = 0
        self.last_pong_s = time.monotonic()
        lost = self.ledger.take_lost()
        kept = [(unique, owed) for unique, owed in lost if self._still_tried(unique, owed)]
        if self.offer.resend:
            self.backings.send(relay.resend_notification())
        for unique, owed in kept:
            if owed.copy is not None:
                copy = bytearray(owed.copy)
                relay.mark_resent(copy)
                owed.since_s = time.monotonic()
                self.ledger.add(unique, owed)
                self._push(bytes(copy))
        if not self.backlog:
            self._read_device(True)
        assert self.worker is not None
        log.info("worker %d serves, %d requests sent again", self.worker.pid, len(kept))
        self.standby = self._spawn()
        self._save_state()

    def _still_tried(self, unique: int, owed: relay.Owed) -> bool:
        if not self.ledger.poisonous(unique):
            return True
        log.error("request %d (opcode %d) has cost several workers: EIO", unique, owed.opcode)
        self._refuse(unique, owed)
        return False

    def _refuse(self, unique: int, owed: relay.Owed) -> None:
        self.ledger.forgive(unique)
        if owed.opcode == relay.RELEASE:
            self.backings.release(owed.fh)
        self.backings.send(relay.error_reply(unique, errno.EIO))

    def _fail_owed(self) -> None:
        self.ledger.worker_died()
        for unique, owed in self.ledger.take_lost():
            self._refuse(unique, owed)

    # time and signals

    def _tick(self, now_s: float, *, late: bool) -> None:
        if late:
            self.last_pong_s = now_s
        if self.restart_wanted:
            self._swap_on_purpose(now_s)
        worker = self.worker
        if worker is None:
            if self.retry_at_s is not None and now_s >= self.retry_at_s:
                self._take_over()
        elif self.worker_deadline_s is not None:
            if now_s > self.worker_deadline_s:
                log.error("worker %d did not start in time", worker.pid)
                worker.end()
        elif worker.serving:
            self._watch(worker, now_s)
        if self.dead_since_s is not None and self.down_since_s is None:
            if now_s - self.dead_since_s > self.settings["give_up_s"]:
                self._give_up_waiting(now_s)

    def _watch(self, worker: Worker, now_s: float) -> None:
        silent_s = now_s - self.last_pong_s
        if self.last_pong_s and silent_s > self.settings["hang_timeout_s"]:
            log.error("worker %d has not answered for %.0f s: killed", worker.pid, silent_s)
            worker.end()
        elif self.ledger.oldest_age_s(now_s) > self.settings["request_timeout_s"]:
            log.error("worker %d sits on a request for too long: killed", worker.pid)
            worker.end()
        else:
            worker.tell({"type": "ping"})
        if self.standby is None:
            self.standby = self._spawn()

    def _give_up_waiting(self, now_s: float) -> None:
        log.error("no worker can be had: requests get EIO until one can")
        self.down_since_s = now_s
        self._fail_owed()
        self._read_device(True)

    def _swap_on_purpose(self, now_s: float) -> None:
        """A new worker (perhaps of a newer version) takes over when nothing is owed."""
        if self.standby is None or not self.standby.ready or self.worker is None:
            return
        if self.drain_until_s is None:
            self.drain_until_s = now_s + DRAIN_S
            self._read_device(False)
        if self.ledger.owed and now_s < self.drain_until_s:
            return
        self.restart_wanted = False
        self.worker.end()

    def _signals(self) -> set[int]:
        seen: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.wakeup, 64):
                seen.update(data)
        return seen

    def _signalled(self, numbers: set[int]) -> None:
        if signal.SIGHUP in numbers and self.worker is not None:
            log.info("restart of the worker asked for")
            if self.standby is not None:
                self._drop(self.standby)  # it may be of the version before
            self.standby = self._spawn()
            self.restart_wanted = True
        if _stop_wanted(numbers) and self.stop_until_s is None:
            log.info("stopping")
            self.stop_until_s = time.monotonic() + self.settings["stop_grace_s"]
            self._unmount()

    def _unmount(self) -> None:
        # in a thread: unmounting may need answers from this very process
        threading.Thread(target=fusedev.unmount, args=(self.settings,), daemon=True).start()

    # end

    def _end_workers(self) -> None:
        for worker in (self.worker, self.standby):
            if worker is not None:
                self._drop(worker)

    def _finish(self) -> int:
        self._end_workers()
        if self.ready_fd is not None:
            self._tell_starter({"error": "unmounted before it was ready"})
        for name in ("control.sock", "state.json"):
            (self.run_dir / name).unlink(missing_ok=True)
        os.close(self.fuse_fd)
        fusedev.clear_dead(self.settings["mountpoint"])
        log.info("unmounted %s", self.settings["mountpoint"])
        return 0


def _stop_wanted(numbers: set[int]) -> bool:
    return bool(numbers & {signal.SIGTERM, signal.SIGINT})


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def main() -> int:
    """Entry point: settings as one JSON argument; log lines go to stderr."""
    settings = json.loads(sys.argv[1])
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    os.chdir("/")
    try:
        return Supervisor(settings).run()
    except Exception:
        log.exception("the supervisor failed; the mount is gone, the arena is kept")
        raise


if __name__ == "__main__":
    sys.exit(main())
