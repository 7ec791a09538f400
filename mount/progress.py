"""Progress on a terminal: one line on stderr, only where somebody can look at it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from mount.terminal import console, duration_text, plain_text, size_text

NAME_CHARACTERS = 48


class Bar:
    """Bytes done of bytes in all, with a text behind them. Shows nothing unless stderr is a terminal."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._progress: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=9)),
                BarColumn(bar_width=20),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, ratio=1)),
                expand=True,
                console=console(err=True),
                transient=True,
            )
            self._task = self._progress.add_task(escape(title), text="", total=None)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done_bytes: int, total_bytes: int, text: str) -> None:
        """How far it is; *text* may have markup."""
        if self._progress is not None:
            self._progress.update(
                self._task, completed=done_bytes, total=max(total_bytes, 1), text=text
            )

    def say(self, text: str) -> None:
        """A line that stays, above the bar; *text* may have markup."""
        if self._progress is not None:
            self._progress.console.print(text)


class UploadBar:
    """What is left to upload, from the progress that the worker tells (mount.durable_commands)."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._first_bytes: int | None = None
        self._trouble = ""

    def show(self, told: dict[str, Any]) -> None:
        """One more report."""
        if not told:
            return
        sent = sum(upload["sent_bytes"] for upload in told["uploading"])
        done = told["committed_bytes"] + sent
        if self._first_bytes is None or done < self._first_bytes:  # another worker counts anew
            self._first_bytes = done
        done -= self._first_bytes
        left = max(0, told["pending_bytes"] - sent)
        self._bar.show(done, done + left, self._text(told, left))

    def _text(self, told: dict[str, Any], left_bytes: int) -> str:
        text = f"{told['pending_rows']} left ({size_text(left_bytes)})"
        if told["uploading"]:
            text += f", {escape(short(told['uploading'][0]['key']))}"
        trouble = told["trouble"]
        if trouble is not None:
            text += f", [red]in trouble for {duration_text(trouble['age_s'])}[/red]"
            if trouble["reason"] != self._trouble:
                self._trouble = trouble["reason"]
                self._bar.say(f"[red]{escape(trouble_text(trouble))}[/red]")
        return text


def trouble_text(trouble: dict[str, Any]) -> str:
    """What the tier refuses, for how long, and whether that may pass."""
    lasting = "; it will not pass by itself" if trouble["permanent"] else ""
    age, attempts = duration_text(trouble["age_s"]), trouble["attempts"]
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return f"{plain_text(trouble['reason'])} (for {age}, {tries}{lasting})"


def short(text: str) -> str:
    """The end of a long path."""
    text = plain_text(text)
    return text if len(text) <= NAME_CHARACTERS else "..." + text[3 - NAME_CHARACTERS :]
