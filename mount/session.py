"""The worker's end of /dev/fuse: stands between the kernel and libfuse, in the task that pyfuse3 waits in.

pyfuse3 waits until its descriptor is readable, lets libfuse read one message from it, and runs a handler.
Here that descriptor is one end of a socket pair in this very process. When pyfuse3 waits, replies that
libfuse has written are passed on to the device, and the next request is read from the device, looked at
(fs.relay) and put into the socket. libfuse sees an ordinary device; no other process is woken for a request.

What it keeps true:
- One request at a time lies in the socket; it is read at once by the task that put it there. What waits
  (for bytes to be fetched, for another node) lies nowhere in its way.
- Other tasks (pings, control) get their turn however many requests come without a pause.
- What a dead worker left unanswered is executed, marked as sent again; one that has cost several workers is
  answered EIO. A reply and the change of the open table that belongs to it are one (fs.opentable).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable

import trio

from fs import relay
from fs.opentable import OpenTable
from fs.residency import Elsewhere
from fs.suspended import Suspended
from fs.types import FH_INO_MASK
from mount.backing import Backings
from mount.waiting import DYING_LOOK_S, Waiting, is_dying
from mount.workers import seqpacket_pair

log = logging.getLogger("ckptfs.session")

MAX_DEATHS = 3
TURN_S = 0.02  # after which other tasks have theirs
LINGER_MS = 1


class _Owed:
    __slots__ = ("access", "fh", "opcode", "pid", "seen")

    def __init__(self, opcode: int, access: int, fh: int, pid: int) -> None:
        self.opcode = opcode
        self.access = access
        self.fh = fh
        self.pid = pid
        self.seen = False


class Session:
    """One FUSE connection, as one worker serves it.

    *passthrough*: whether to agree to it. *resend*: whether the kernel may be asked to send again (if it
    offers that); without, what is unanswered is executed from where it lies. *open_refused* is told
    the handle of an open that the vfs granted and that did not reach the application. *elsewhere*: reads
    of files that are not resident. *may_pass*: whether the kernel may move the bytes of an open handle.
    """

    def __init__(
        self,
        device_fd: int,
        table: OpenTable,
        backings: Backings,
        *,
        passthrough: bool,
        resend: bool,
        open_refused: Callable[[int], object],
        suspended: Suspended | None = None,
        elsewhere: Elsewhere | None = None,
        may_pass: Callable[[int], bool] = lambda fh: True,
    ) -> None:
        self.ours, self.theirs = seqpacket_pair()
        self.serving = trio.Event()
        self._device_fd = device_fd
        self._table = table
        self._backings = backings
        self._passthrough = passthrough
        self._may_resend = resend
        self._open_refused = open_refused
        self._offer = relay.Offer(False, False)
        self._owed: dict[int, _Owed] = {}
        self._staged = False  # a message lies in the socket for libfuse
        self._replayed_init: int | None = None
        self._in_hand = 0  # what the last worker died with
        self._turn_began_s = 0.0
        self._lingers = True
        self._poll = select.poll()
        self._poll.register(device_fd, select.POLLIN)
        self._reply_buffer = bytearray(relay.READ_BUFFER_BYTES)
        self._may_pass = may_pass
        self._suspended = suspended
        self._again: deque[bytes] = deque()  # what the last worker left, to be executed again
        self._abandoned: dict[int, _Owed] = {}  # answered in libfuse's place
        self.waiting = Waiting(backings, elsewhere, self._reply_buffer, self._answered)

    # start

    def take_over(self) -> None:
        """Settle what the last worker had in hand, and replay INIT for libfuse."""
        table = self._table
        init = table.init_request
        last_id = table.last_backing_id
        self._see_offer(init)
        self._probe()
        answered = 0
        if table.redo_reply:
            answered = relay.REPLY_HEADER.unpack_from(table.redo_reply)[2]
            self._backings.send(table.redo_reply)
            self._answered(answered)
            table.settled()
        self._backings.adopt(last_id)
        unfinished = table.unfinished()
        self._in_hand = 0 if unfinished == answered else unfinished
        self._replayed_init = relay.REQUEST_HEADER.unpack_from(init)[2]
        self._stage(init)

    def _see_offer(self, init: bytes) -> None:
        self._offer = relay.parse_offer(init)
        if not self._may_resend:
            self._offer = self._offer._replace(resend=False)
        # without resend only the last request read can be found again
        self._backings.slow_inline = not self._offer.resend

    def _probe(self) -> None:
        if self._passthrough and self._offer.passthrough:
            with open(os.memfd_create("probe"), "rb") as file:
                self._backings.passthrough = self._backings.probe(file.fileno())

    @property
    def lane(self) -> str:
        """The lane in use, once INIT is answered."""
        return "passthrough" if self._backings.passthrough else "plain"

    def why_plain(self) -> str:
        """Why the kernel does not move the bytes."""
        if not self._passthrough:
            return "the plain lane was asked for"
        if not self._offer.passthrough:
            return "the kernel offers no passthrough (Linux 6.9 needed)"
        return "registering a backing file was refused (CAP_SYS_ADMIN needed)"

    # what pyfuse3 waits in

    async def wait_readable(self) -> None:
        """Return when a request for libfuse lies in its socket. Raises ClosedResourceError at unmount."""
        while True:
            self.pass_replies()
            if self._staged or self._left_request() or self._lingering_request():
                self._staged = False
                if time.monotonic() - self._turn_began_s > TURN_S:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    self._turn_began_s = time.monotonic()
                return
            await trio.lowlevel.wait_readable(self._device_fd)
            self._turn_began_s = time.monotonic()
            self._lingers = True

    def _lingering_request(self) -> bool:
        """Whether a request has come, or comes soon.

        Whoever has just been answered often asks again at once. Waiting for that in poll(2) costs a
        fraction of a turn through the event loop, and the loop is kept for no longer than LINGER_MS.
        """
        if not self._lingers or self._owed or self.waiting:  # that waits for something in the loop
            return False
        while self._poll.poll(LINGER_MS):
            if self._next_request():
                return True
            if time.monotonic() - self._turn_began_s > TURN_S:
                break
        self._lingers = False
        return False

    async def pass_late_replies(self) -> None:
        """Pass on what is written while nobody waits for a request (notifications, late answers)."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.waiting.run)
            nursery.start_soon(self._watch_owed)
            while True:
                await trio.lowlevel.wait_readable(self.ours)
                while self._pass_one():
                    pass

    async def _watch_owed(self) -> None:
        """A process that was sent SIGKILL does not end before its requests are answered."""
        while True:
            await trio.sleep(DYING_LOOK_S)
            for unique, owed in list(self._owed.items()):
                if owed.seen and owed.opcode != relay.RELEASE and is_dying(owed.pid):
                    self._abandoned[unique] = self._owed.pop(unique)
                    self._backings.send(relay.error_reply(unique, errno.EINTR))
                    self._answered(unique)
                owed.seen = True

    # requests

    def _next_request(self) -> bool:
        """Read requests until one is for libfuse; False when there are no more for now."""
        for _ in range(64):
            if not self._offer.resend and self._table.is_in_hand():
                self._keep_in_hand()
            try:
                size = os.readv(self._device_fd, [self._table.request])
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno == errno.ENODEV:
                    raise trio.ClosedResourceError from None
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            if self._request(size):
                return True
        return False  # bytes were moved for long enough: the wait lets others have their turn

    def _keep_in_hand(self) -> None:
        """The request read last waits, and its place is needed for the next one."""
        if self._suspended is None:
            return
        size = relay.REQUEST_HEADER.unpack_from(self._table.request)[0]
        if not self._suspended.keep(self._table.request[:size]):
            log.error("no room to keep a request that waits: it hangs if this worker dies")

    def _left_request(self) -> bool:
        """Execute what the last worker left unanswered and the kernel cannot send again."""
        while self._again:
            message = self._again.popleft()
            self._table.request[: len(message)] = message
            if self._request(len(message), resent=True):
                return True
        return False

    def _answered(self, unique: int) -> None:
        if self._suspended is not None:
            self._suspended.answered(unique)
        self._table.done(unique)

    def _request(self, size: int, *, resent: bool = False) -> bool:
        """Answer the request in the table, or give it to libfuse (True)."""
        request = self._table.request[:size]
        _, opcode, unique, _ = relay.REQUEST_HEADER.unpack_from(request)
        if opcode in relay.IGNORED:
            self._table.done(unique)
            return False
        if self._is_poisonous(unique):
            log.error("request %d (opcode %d) has cost %d workers: EIO", unique, opcode, MAX_DEATHS)
            self._backings.send(relay.error_reply(unique, errno.EIO))
            self._answered(unique)
            return False
        if opcode in relay.LOCAL:
            self._serve(opcode, unique, request)
            return False
        access, fh = 0, 0
        if opcode == relay.INIT:
            self._table.init_request = bytes(request)
            self._see_offer(self._table.init_request)
        elif opcode == relay.RELEASE:
            fh = relay.fh_of(request)
        elif opcode in (relay.READDIR, relay.READDIRPLUS):
            relay.bound_readdir(request)
        elif opcode in (relay.OPEN, relay.CREATE, relay.TMPFILE):
            access = relay.open_access(request)
        pid = relay.pid_of(request)
        relay.number_request(request, unique | relay.RESENT_UNIQUE if resent else unique)
        if opcode == relay.TMPFILE:
            opcode, request = relay.CREATE, memoryview(relay.tmpfile_as_create(request))
        self._owed[unique] = _Owed(opcode, access, fh, pid)
        self._stage(request)
        return True

    def _serve(self, opcode: int, unique: int, request: memoryview) -> None:
        """Answer a request for bytes, now or when they are there."""
        if self._backings.serves(request):
            self._backings.serve(opcode, unique, request, self._reply_buffer)
        elif not self.waiting.serve(opcode, unique, request):
            if not self._offer.resend:
                self._keep_in_hand()
            self._table.done(unique)
            return
        self._answered(unique)

    def _is_poisonous(self, unique: int) -> bool:
        if not self._in_hand:
            return False
        suspect, deaths = self._table.suspect()
        return suspect == unique & ~relay.RESENT_UNIQUE and deaths >= MAX_DEATHS

    def _stage(self, message: bytes | memoryview) -> None:
        self.ours.send(message)
        self._staged = True

    # replies

    def pass_replies(self) -> None:
        """Give the kernel what libfuse has written."""
        while (self._owed or self._replayed_init is not None) and self._pass_one():
            pass

    def _pass_one(self) -> bool:
        try:
            size = self.ours.recv_into(self._reply_buffer)
        except BlockingIOError:
            return False
        self._pass(memoryview(self._reply_buffer)[:size])
        return True

    def _pass(self, reply: memoryview) -> None:
        _, error, unique = relay.REPLY_HEADER.unpack_from(reply)
        if unique == self._replayed_init:
            self._init_replayed()
            return
        owed = self._owed.pop(unique, None) if unique else None
        if owed is None:
            if unique in self._abandoned:
                self._discard(self._abandoned.pop(unique), reply)
                return
            self._backings.send(reply)
        elif owed.opcode in (relay.OPEN, relay.CREATE) and not error:
            self._grant(owed, unique, reply)
        elif owed.opcode == relay.RELEASE:
            self._confirm_release(owed.fh, unique, reply)
        elif owed.opcode == relay.INIT and not error:
            may = self._passthrough and self._offer.passthrough
            relay.patch_init_reply(reply, self._offer, passthrough=may)
            self._backings.send(reply)
            self._probe()
            self.serving.set()
        else:
            self._backings.send(reply)
        self._answered(unique)

    def _discard(self, owed: _Owed, reply: memoryview) -> None:
        """Nobody waits for this any more."""
        if (
            owed.opcode in (relay.OPEN, relay.CREATE)
            and not relay.REPLY_HEADER.unpack_from(reply)[1]
        ):
            self._open_refused(relay.parse_open_reply(owed.opcode, reply).fh)

    def _grant(self, owed: _Owed, unique: int, reply: memoryview) -> None:
        parsed = relay.parse_open_reply(owed.opcode, reply)
        try:
            backing_id = self._backings.id_for(parsed.fh, may_pass=self._may_pass(parsed.fh))
        except OSError as error:
            log.error("backing file of inode %d: %s", parsed.fh & FH_INO_MASK, error)
            self._open_refused(parsed.fh)
            self._backings.send(relay.error_reply(unique, errno.EIO))
            return
        # where the kernel passes some files' bytes on, it does not see what changes behind its pages
        keep_cache = not self._backings.passthrough
        relay.patch_open_reply(reply, parsed, owed.access, backing_id, keep_cache=keep_cache)
        self._table.add(parsed.fh, backing_id, reply)
        if not self._backings.send(reply):  # nobody has it: unmounted
            self._open_refused(parsed.fh)
            if self._table.drop(parsed.fh, b""):
                self._backings.unused(parsed.fh & FH_INO_MASK)
        # before settled: one of the two tells that the kernel has the reply
        self._answered(unique)
        self._table.settled()

    def _confirm_release(self, fh: int, unique: int, reply: memoryview) -> None:
        last = self._table.drop(fh, reply)
        self._backings.send(reply)
        self._answered(unique)
        if last:
            self._backings.unused(fh & FH_INO_MASK)
        self._table.settled()

    def _init_replayed(self) -> None:
        self._replayed_init = None
        in_hand = self._in_hand
        if self._offer.resend:
            self._backings.send(relay.resend_notification())
        else:
            self._find_left(in_hand)
        self.serving.set()
        log.info("serving; %s", f"request {in_hand} was in hand" if in_hand else "nothing in hand")

    def _find_left(self, in_hand: int) -> None:
        if in_hand:
            size = relay.REQUEST_HEADER.unpack_from(self._table.request)[0]
            self._again.append(bytes(self._table.request[:size]))
        if self._suspended is None:
            return
        if in_hand:
            self._suspended.keep(self._again[0])  # its place is needed for the others
        self._again = deque(self._suspended.requests())
