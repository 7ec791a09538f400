"""Holds writes to the arena's size where no tmpfs of its own does it (a directory, as a user without root).

What it keeps true: bytes written between two looks at the directory never exceed the room there was at the
first. Writes are charged in full, though they may replace bytes, so near the limit it looks again; a refused
write has just looked, which is why space freed by an unlink counts at once.
"""

from __future__ import annotations

from fs.arena import used_bytes


class Budget:
    """Room for backing files in the open directory *data_fd*, *size_bytes* together."""

    def __init__(self, data_fd: int, size_bytes: int) -> None:
        self._data_fd = data_fd
        self._size_bytes = size_bytes
        self._credit_bytes = 0

    def admit(self, wanted_bytes: int) -> bool:
        """Whether that many more bytes may be written; then they count."""
        if wanted_bytes > self._credit_bytes:
            self._credit_bytes = self._size_bytes - used_bytes(self._data_fd)
        if wanted_bytes > self._credit_bytes:
            return False
        self._credit_bytes -= wanted_bytes
        return True
