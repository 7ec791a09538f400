"""A proxy between an S3 client and a real store, which fails as it is told.

    with FaultProxy(rgw.port) as proxy:
        tier = S3Tier(bucket, "", S3Options(endpoint_url=proxy.url))
        proxy.inject(slow_down(), operation="upload_part", nth=2, times=3)
        ...
        assert proxy.count("upload_part") == 5

What it keeps true: a request that no fault is meant for reaches the store byte by byte, the Host header included, so
that its signature is checked there; and every request is in `requests`, in order of arrival, with what became of it.
Faults are in tests.s3faults: each a function of an Exchange, so a test may write its own.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.exchange import LINGER_S, Ended, Exchange, Fault
from tests.httpwire import Head, Stream
from tests.s3requests import Request, request_of

UPSTREAM_TIMEOUT_S = 60.0

When = Callable[[Request], bool]


@dataclass
class Rule:
    """When a fault happens. Made by FaultProxy.inject."""

    proxy: FaultProxy
    fault: Fault
    when: When
    nth: int
    times: int | None
    until_s: float
    matches: int = 0
    hits: int = 0

    def remove(self) -> None:
        """No longer."""
        with contextlib.suppress(ValueError):
            self.proxy._rules.remove(self)

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def _fires(self, request: Request) -> bool:
        if time.monotonic() > self.until_s or not self.when(request):
            return False
        self.matches += 1
        if self.matches < self.nth or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Listens on loopback from its making until `close`. *port*: where the store listens on loopback.

    *tls*: as https, with the certificate of tests.tls; to the store it is http all the same.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.upstream = ("127.0.0.1", port)
        self.requests: list[Request] = []
        self.errors: list[str] = []  # of the proxy itself: a test should find none
        # Called after each change of what the bucket shows, while no other change is under way.
        self.on_change: Callable[[Request], None] | None = None
        self._one_change = threading.Lock()
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self._connections: set[Connection] = set()
        self._closing = False
        self._address = ("127.0.0.1", 0)
        self.listen()

    @property
    def url(self) -> str:
        """The endpoint to give to a client."""
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{self._address[0]}:{self._address[1]}"

    # what goes wrong

    def inject(
        self,
        fault: Fault,
        *,
        operation: str | tuple[str, ...] = (),
        when: When | None = None,
        nth: int = 1,
        times: int | None = 1,
        for_s: float | None = None,
    ) -> Rule:
        """Let *fault* happen to requests of *operation* (boto3's name; any when empty) for which *when* is true.

        From the *nth* such request from now on, *times* in a row (None: for ever), for *for_s* seconds at most. Of
        several rules the one given first that fires counts; the later ones do not see the request.
        """
        wanted = (operation,) if isinstance(operation, str) else operation

        def matches(request: Request) -> bool:
            return (not wanted or request.operation in wanted) and (when is None or when(request))

        until_s = float("inf") if for_s is None else time.monotonic() + for_s
        rule = Rule(self, fault, matches, nth, times, until_s)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Remove all faults; requests that hang are reset."""
        with self._lock:
            self._rules.clear()
            self._healed.set()
            self._healed = threading.Event()

    def refuse(self) -> None:
        """Nobody listens any more, and connections end: as when the store's process has died."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.drop_connections()

    def listen(self) -> None:
        """Listen (again), at the same address."""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(self._address)
        self._listener.listen(256)
        self._address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._thread.start()

    def drop_connections(self) -> None:
        """End every connection that is open, whatever is under way."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.abort()

    # what was seen

    def seen(self, operation: str, **fields: Any) -> list[Request]:
        """Requests of *operation* that have these values."""
        return [
            request
            for request in self.requests.copy()
            if request.operation == operation
            and all(getattr(request, name) == value for name, value in fields.items())
        ]

    def count(self, operation: str) -> int:
        """How many requests of *operation* came."""
        return len(self.seen(operation))

    @property
    def counts(self) -> Counter[str]:
        """How many requests came, by operation."""
        return Counter(request.operation for request in self.requests.copy())

    # life

    def close(self) -> None:
        """End all connections and threads."""
        self._closing = True
        self.refuse()
        self.heal()
        for connection in list(self._connections):
            connection.thread.join(LINGER_S * 2)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            Connection(self, sock).thread.start()

    def _take(self, head: Head) -> tuple[Request, Rule | None]:
        with self._lock:
            request = request_of(head, len(self.requests) + 1, time.monotonic())
            self.requests.append(request)
            rule = next((rule for rule in self._rules if rule._fires(request)), None)
        if rule is not None:
            request.fault = getattr(rule.fault, "__qualname__", repr(rule.fault)).split(".")[0]
        return request, rule


class Connection:
    """One connection of a client, with one to the store behind it that is kept as long."""

    def __init__(self, proxy: FaultProxy, sock: socket.socket) -> None:
        self.proxy = proxy
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client = Stream(sock)
        self._upstream: Stream | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        with proxy._lock:
            proxy._connections.add(self)

    def upstream(self) -> Stream:
        """The connection to the store."""
        if self._upstream is None:
            sock = socket.create_connection(self.proxy.upstream, UPSTREAM_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._upstream = Stream(sock)
        return self._upstream

    def close_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.sock.close()
            self._upstream = None

    def abort(self) -> None:
        """From another thread: the one that serves it finds its sockets shut."""
        for stream in (self.client, self._upstream):
            with contextlib.suppress(OSError, AttributeError):
                stream.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def _run(self) -> None:
        try:
            if self.proxy.tls is not None:
                self.client.sock = self.proxy.tls.wrap_socket(self.client.sock, server_side=True)
            while (head := self.client.head()) is not None:
                self._serve(head)
        except (Ended, ConnectionError, ssl.SSLError):
            pass
        except Exception as error:
            if not self.proxy._closing:
                self.proxy.errors.append(repr(error))
        finally:
            self.client.sock.close()
            self.close_upstream()
            with self.proxy._lock:
                self.proxy._connections.discard(self)

    def _serve(self, head: Head) -> None:
        if self._upstream is not None and self._upstream.has_gone():
            self.close_upstream()  # the store ended an idle connection
        request, rule = self.proxy._take(head)
        exchange = Exchange(self.proxy, request, head, self.client, self)
        try:
            if rule is None:
                exchange.relay(exchange.forward())
            else:
                rule.fault(exchange)
        finally:
            request.done = True
