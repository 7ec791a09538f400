"""Which rows of the journal may go now."""

from __future__ import annotations

from fs.journal import Row
from fs.store import Store


class Schedule:
    """Everything, in order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.draining = False

    def ready(self, tree: str, limit: int) -> list[Row]:
        """Rows of a tree that may go, in order, at most *limit*."""
        journal = self._store.journal
        after_seq = 0
        while rows := journal.in_tree(tree, after_seq, limit):
            ready = journal.settle_jumps(tree, rows)
            if ready:
                return ready
            after_seq = rows[-1].seq
        return []

    def why_held(self, row: Row) -> str:
        """Why policy does not let a row go now; "" when it does."""
        return ""
