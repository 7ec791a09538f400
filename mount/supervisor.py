"""The supervisor: owns the mount, starts and watches the worker that serves it, and outlives workers.

    kernel <-- /dev/fuse --> worker        (and one standby: imported, waiting, touching nothing)
                  |
            held open here

What it keeps true:
- The connection does not end with a worker: the device is held open here, and the next worker takes over
  what the kernel has not been answered (mount.session). No application sees an error.
- A worker whose event loop does not turn is killed. When no worker can be had at all, requests are answered
  EIO after a while: nothing hangs for ever.
- Two workers never serve at once: one is gone before the next is told to open the index.

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
from pathlib import Path
from typing import Any

from fs import relay
from mount import fusedev
from mount.workers import Worker

log = logging.getLogger("ckptfs.supervisor")

TICK_S = 0.5
START_S = 120.0  # a first start looks at every backing file
TAKEOVER_S = 20.0
RETRY_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
DRAIN_MARGIN_S = 0.5  # of the grace, for the worker to say what is left
DETACHED_S = 1.0  # at least, for those who use the mount when draining took the whole grace


class Refused(Exception):
    """The mount cannot be had; the text says why."""


class Supervisor:
    """Settings come as one JSON argument, made by mount.lifecycle."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.run_dir = Path(settings["run_dir"])
        self.epoll = select.epoll()
        self.control = self._listen()
        self.wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.device_fd = -1
        self.lane = ""
        self.worker: Worker | None = None
        self.standby: Worker | None = None
        self.restarts = 0
        self.failures = 0  # since a worker served last
        self.retry_at_s: float | None = None
        self.dead_since_s: float | None = None
        self.refusing = False  # no worker for long: EIO
        self.last_pong_s = 0.0
        self.start_deadline_s: float | None = None
        self.restart_wanted = False
        self.grace_until_s: float | None = None  # a stop was asked for: drain until then
        self.stop_until_s: float | None = None  # detached
        self.ready_fd: int | None = settings["ready_fd"]

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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.epoll.register(self.wakeup, select.EPOLLIN)
        try:
            worker = self.worker = self._spawn()
            worker.tell({"type": "open", "fresh": True})
            self._await_opened(worker)
            self.device_fd = fusedev.open_and_mount(self.settings)
        except (Refused, OSError) as error:
            self._fail_start(_words(error))
            self._end_workers()
            return 1
        self.epoll.register(self.device_fd, 0)  # errors only
        worker.tell({"type": "serve"}, self.device_fd)
        self.start_deadline_s = time.monotonic() + TAKEOVER_S
        return self._loop()

    def _await_opened(self, worker: Worker) -> None:
        """Wait until the worker trusts the index; nothing is mounted before."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            for fd, _ in self.epoll.poll(TICK_S):
                if fd == self.wakeup and _stop_wanted(self._signals()):
                    raise Refused("interrupted")
                if fd != worker.link.fileno():
                    continue
                messages = worker.heard()
                if messages is None:
                    raise Refused(f"the worker ended at its start; see {self.run_dir / 'log'}")
                for message in messages:
                    if message["type"] == "failed":
                        raise Refused(message["error"])
                    if message["type"] == "opened":
                        return
        raise Refused(f"the worker did not answer within {START_S:.0f} s")

    def _fail_start(self, why: str) -> None:
        log.error("not mounted: %s", why)
        self._tell_starter({"error": why})

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
            "lane": self.lane,
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
        next_tick_s = time.monotonic() + TICK_S
        while True:
            for fd, events in self.epoll.poll(TICK_S):
                if fd == self.device_fd:
                    if events & (select.EPOLLERR | select.EPOLLHUP) or not self._refuse_requests():
                        return self._finish()
                elif fd == self.wakeup:
                    self._signalled(self._signals())
                elif not self._link_ready(fd):
                    return self._finish()
            now_s = time.monotonic()
            if now_s < next_tick_s:
                continue
            if now_s > next_tick_s + 2 * TICK_S:
                self.last_pong_s = now_s  # it was we who were stopped
            next_tick_s = now_s + TICK_S
            self._tick(now_s)
            if self.grace_until_s is not None and now_s > self.grace_until_s:
                self._detach()
            if self.stop_until_s is not None and now_s > self.stop_until_s:
                log.warning("still in use at the end of the grace period; its users see errors now")
                return self._finish()

    def _link_ready(self, fd: int) -> bool:
        """Hear a worker; False when the mount has ended with it."""
        for worker in (self.worker, self.standby):
            if worker is None or worker.link.fileno() != fd:
                continue
            messages = worker.heard()
            for message in messages or []:
                self._heard(worker, message)
            if messages is None and worker is self.worker:
                return self._worker_died(worker)
            if messages is None:
                log.warning("the standby worker %d ended", worker.pid)
                self._drop(worker)
                self.standby = None
                self._save_state()
            break
        return True

    def _heard(self, worker: Worker, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "pong":
            self.last_pong_s = time.monotonic()
        elif kind == "standby":
            worker.ready = True
            if worker is self.standby:
                self._save_state()
        elif kind == "serving" and worker is self.worker:
            self._serving(worker, message)
        elif kind == "drained" and worker is self.worker and self.grace_until_s is not None:
            self._detach()
        elif kind == "failed":
            log.error("worker %d cannot serve: %s", worker.pid, message["error"])

    def _serving(self, worker: Worker, message: dict[str, Any]) -> None:
        worker.serving = True
        self.lane = message["lane"]
        self.start_deadline_s = self.dead_since_s = None
        self.failures = 0
        self.last_pong_s = time.monotonic()
        if self.ready_fd is not None or self.restarts == 0:
            if self.settings["require_passthrough"] and self.lane == "plain":
                self._fail_start(f"passthrough is required, but {message['why_plain']}")
                self.stop_until_s = time.monotonic() + TAKEOVER_S
                self._unmount()
                return
            name, target = self.settings["name"], self.settings["mountpoint"]
            why = f": {message['why_plain']}" if self.lane == "plain" else ""
            log.info("mounted %s on %s (%s lane%s)", name, target, self.lane, why)
        if self.standby is None:
            self.standby = self._spawn()
        self._save_state()
        self._tell_starter({"lane": self.lane})
        self._drain()

    # workers come and go

    def _drop(self, worker: Worker) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.epoll.unregister(worker.link)
        worker.close()

    def _worker_died(self, worker: Worker) -> bool:
        """Let the next one take over; False when the mount itself has ended."""
        self._drop(worker)
        self.worker = None
        poll = select.poll()
        poll.register(self.device_fd, 0)
        if poll.poll(0):
            return False
        if not worker.serving and self.restarts == 0 and self.ready_fd is not None:
            self._fail_start(f"the worker died at its start; see {self.run_dir / 'log'}")
            self._unmount()
            return True
        self.restarts += 1
        self.failures += 1
        now_s = time.monotonic()
        self.dead_since_s = self.dead_since_s or now_s
        delay_s = 0.0 if self.standby else RETRY_S[min(self.failures - 1, len(RETRY_S) - 1)]
        self.retry_at_s = now_s + delay_s
        log.warning("worker %d is gone", worker.pid)
        if delay_s == 0:
            self._take_over(now_s)
        self._save_state()
        return True

    def _take_over(self, now_s: float) -> None:
        self.retry_at_s = None
        self._stop_refusing()
        worker = self.worker = self.standby or self._spawn()
        self.standby = None
        self.start_deadline_s = now_s + TAKEOVER_S
        worker.tell({"type": "open", "fresh": False})
        worker.tell({"type": "serve"}, self.device_fd)

    def _tick(self, now_s: float) -> None:
        worker = self.worker
        if worker is None:
            if self.retry_at_s is not None and now_s >= self.retry_at_s:
                self._take_over(now_s)
        elif self.start_deadline_s is not None:
            if now_s > self.start_deadline_s:
                log.error("worker %d did not start in time", worker.pid)
                worker.end()
        else:
            self._watch(worker, now_s)
        for_s = now_s - (self.dead_since_s or now_s)
        if self.worker is None and not self.refusing and for_s > self.settings["give_up_s"]:
            self._begin_refusing()

    def _watch(self, worker: Worker, now_s: float) -> None:
        silent_s = now_s - self.last_pong_s
        if silent_s > self.settings["hang_timeout_s"]:
            log.error("worker %d has not answered for %.1f s: killed", worker.pid, silent_s)
            worker.end()
            return
        worker.tell({"type": "ping"})
        if self.standby is None:
            self.standby = self._spawn()
        elif self.restart_wanted and self.standby.ready:
            self.restart_wanted = False
            worker.end()

    # without any worker

    def _begin_refusing(self) -> None:
        log.error("no worker can be had: requests get EIO until one can")
        self.refusing = True
        with contextlib.suppress(OSError):
            os.write(self.device_fd, relay.resend_notification())
        with open(Path(self.settings["worker"]["index"]) / "session", "rb") as session:
            in_hand = relay.request_in_hand(session.read(1 << 16))
        self._refuse(in_hand)
        self.epoll.modify(self.device_fd, select.EPOLLIN)

    def _stop_refusing(self) -> None:
        if self.refusing:
            self.refusing = False
            self.epoll.modify(self.device_fd, 0)

    def _refuse_requests(self) -> bool:
        buffer = bytearray(relay.READ_BUFFER_BYTES)
        while self.refusing:
            try:
                os.readv(self.device_fd, [buffer])
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return False
                continue
            _, opcode, unique, _ = relay.REQUEST_HEADER.unpack_from(buffer)
            if opcode not in relay.IGNORED:
                self._refuse(unique)
        return True

    def _refuse(self, unique: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self.device_fd, relay.error_reply(unique, errno.EIO))

    # signals and the end

    def _signals(self) -> set[int]:
        seen: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.wakeup, 64):
                seen.update(data)
        return seen

    def _signalled(self, numbers: set[int]) -> None:
        if signal.SIGHUP in numbers:
            log.info("a restart of the worker was asked for")
            if self.standby is not None:
                self._drop(self.standby)  # it may be of the version before
            self.standby = self._spawn()
            self.restart_wanted = True
        if _stop_wanted(numbers):
            if self.grace_until_s is None and self.settings["worker"].get("durable"):
                log.info("stopping, once everything is durable")
                self.grace_until_s = time.monotonic() + self.settings["stop_grace_s"]
                self._drain()
            else:
                self._detach()  # there is nothing to drain, or it was asked for a second time

    def _drain(self) -> None:
        """Tell the worker that serves, each one anew."""
        if self.grace_until_s is None or self.stop_until_s is not None:
            return
        if self.worker is not None and self.worker.serving:
            left_s = max(0.0, self.grace_until_s - time.monotonic() - DRAIN_MARGIN_S)
            self.worker.tell({"type": "drain", "timeout_s": left_s})

    def _detach(self) -> None:
        if self.stop_until_s is not None:
            return
        log.info("stopping")
        now_s = time.monotonic()
        if self.grace_until_s is None:
            self.stop_until_s = now_s + self.settings["stop_grace_s"]
        else:
            self.stop_until_s = max(self.grace_until_s, now_s + DETACHED_S)
        self._unmount()

    def _unmount(self) -> None:
        # in a thread: unmounting may need answers from the worker, and the worker us
        threading.Thread(target=fusedev.unmount, args=(self.settings,), daemon=True).start()

    def _end_workers(self) -> None:
        for worker in (self.worker, self.standby):
            if worker is not None:
                self._drop(worker)

    def _finish(self) -> int:
        self._end_workers()
        self._tell_starter({"error": "unmounted before it was ready"})
        for name in ("control.sock", "state.json"):
            (self.run_dir / name).unlink(missing_ok=True)
        os.close(self.device_fd)
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
