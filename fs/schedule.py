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
        return self._store.journal.in_tree(tree, 0, limit)
