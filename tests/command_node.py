"""A node with a durable tier and its control socket, without a mount: what `ckptfs` commands talk to."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from fs.durable import Durable
from fs.journal import Row
from fs.residence import Residence
from fs.schedule import Schedule
from fs.tiers.tier import Tier
from mount import control
from mount.control import Answer, Control, Request
from mount.durable_commands import DurableCommands, Verifying
from tests.durable_node import DurableNode


class Holding(Schedule):
    """A policy of the test's: what it holds back waits, unless somebody drains or asks for it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.holds: Callable[[Row], bool] = lambda row: False

    def ready(self, tree: str, limit: int) -> list[Row]:
        rows = super().ready(tree, limit)
        return rows if self.draining else [row for row in rows if not self.why_held(row)]

    def why_held(self, row: Row) -> str:
        return "the test holds it" if not row.forced and self.holds(row) else ""


class CommandNode(DurableNode):
    """Serves `socket_path` while it is `serving`."""

    def __init__(self, directory: Path, tier: Tier, *, verifier: Verifying | None = None) -> None:
        super().__init__(directory, tier)
        self.schedule = self.writeback.schedule = Holding(self.store)
        self.durable = Durable(self.store, self.writeback)
        self.residence = Residence(
            self.index,
            self.arena,
            self.store.content,
            self.objects,
            self.paths,
            tier,
            keeps=self.journal.keeps,
            is_clean=self.journal.is_clean,
        )
        self.vfs._residency = self.residence  # type: ignore[assignment]
        self.vfs.virtual_xattrs.attach(self.durable, self.paths.keys, self.writeback.poke)
        self.commands = DurableCommands(
            self.vfs, self.durable, self.residence.fetcher, self.residence.evictor, verifier
        )
        self.control = Control(self.vfs, self.commands)
        self.socket_path = directory / "s"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Writeback, fetching and the socket, until the block ends."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.socket_path))
            listener.listen(16)
            listener.setblocking(False)
            async with trio.open_nursery() as nursery:
                await nursery.start(self.residence.run)
                nursery.start_soon(self.writeback.run)
                nursery.start_soon(self.control.serve, listener)
                yield
                nursery.cancel_scope.cancel()
        self.socket_path.unlink()
        self.close()

    async def all_answers(self, command: str, path: str = "", **fields: object) -> list[Answer]:
        """Everything that is answered, as a client hears it."""
        request = Request(command, path.encode(), **fields)  # type: ignore[arg-type]
        return await trio.to_thread.run_sync(
            lambda: list(control.stream(self.socket_path, request)), abandon_on_cancel=True
        )

    async def ask(self, command: str, path: str = "", **fields: object) -> Answer:
        """The final answer."""
        return (await self.all_answers(command, path, **fields))[-1]
