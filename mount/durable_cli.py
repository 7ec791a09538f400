"""The commands about the durable tier: wait, persist, evict, prefetch, verify, unsaved.

What it keeps true: each ends with a status that says whether all of it was done, names what was not and why, and can
be interrupted, which ends it in the worker too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
from rich.table import Table
from rich.text import Text

from fs.errors import CkptfsError
from mount import control, rundir
from mount.control import Answer, FileResult, Request, UnsavedReport
from mount.progress import Bar, UploadBar, short
from mount.terminal import (
    EXIT_FAILED,
    EXIT_TIMED_OUT,
    Duration,
    age_text,
    plain_name,
    plain_text,
    print_json,
    print_table,
    size_text,
)

SILENCE_S = 30.0  # a worker that hangs is replaced before
AGAIN_S = 0.2
AGAIN_TRIES = 150  # a worker that died is replaced long before
LISTED = 20


class Target(NamedTuple):
    """A path of a mount: as it was given, and relative to the mount."""

    run: rundir.RunDir
    path: str
    relative: bytes


def targets(paths: tuple[str, ...]) -> Iterator[Target]:
    """Where these paths lie; of a symlink also what it leads to, if that is on the same mount."""
    for path in paths:
        target = _target(path)
        yield target
        if not os.path.islink(path):
            continue
        try:
            behind = _target(os.path.realpath(path))
        except CkptfsError:
            continue
        if behind.run.path == target.run.path:
            yield behind


def _target(path: str) -> Target:
    run, relative = rundir.find_by_path(path)
    if not run.is_live():
        raise rundir.NoSuchMount(f"{path}: its supervisor is gone; `ckptfs mount` brings it back")
    return Target(run, path, os.fsencode(relative))


def answers(run: rundir.RunDir, request: Request) -> Iterator[Answer]:
    """What the worker answers, up to the final answer; the next worker is asked again when one goes away."""
    began_s = time.monotonic()
    timeout_s = request.timeout_s
    for _ in range(AGAIN_TRIES):
        if timeout_s is not None:
            request.timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))
        try:
            yield from control.stream(run.control, request, SILENCE_S)
            return
        except control.Unanswered:
            if not run.is_live():
                raise
        time.sleep(AGAIN_S)
    raise CkptfsError(f"{run.mountpoint()}: no worker answers; see {run.log}")


def asked(target: Target, request: Request) -> Iterator[Answer]:
    """As `answers`, about a path; errors name it."""
    try:
        yield from answers(target.run, request)
    except CkptfsError as error:
        raise CkptfsError(f"{target.path}: {error}") from error


def say_error(text: str) -> None:
    """One line on stderr."""
    click.echo(f"ckptfs: {text}", err=True)


def unsaved_row(report: UnsavedReport) -> dict[str, Any]:
    """For JSON."""
    return {
        "path": report.key,
        "size_bytes": report.size_bytes,
        "since_ns": report.since_ns,
        "state": report.state,
        "reason": report.reason,
    }


def unsaved_line(report: UnsavedReport) -> str:
    """For people."""
    size = size_text(report.size_bytes) if report.size_bytes else ""
    facts = ", ".join(part for part in (size, report.state, age_text(report.since_ns)) if part)
    return f"  {plain_text(report.key)} ({facts}): {plain_text(report.reason)}"


paths_argument = click.argument("paths", nargs=-1, required=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress, no summary.")


@click.command()
@paths_argument
@click.option(
    "--until",
    type=click.Choice(["local", "durable"]),
    default="durable",
    show_default=True,
    help="What to wait for.",
)
@click.option("--timeout", "timeout_s", type=Duration(), help="Give up after this (10m, 90s).")
@quiet_option
@json_option
def wait(
    paths: tuple[str, ...], until: str, timeout_s: float | None, quiet: bool, as_json: bool
) -> int:
    """Return when PATHS, and all that is below them, are durable.

    A file that is open for writing is not durable before it is closed. Exit status: 5 when the time is over, with what
    is not durable and why; 1 when policy does not make it durable (`ckptfs persist` does).

    Example: ckptfs wait /ckpt/step_100 --until durable --timeout 10m
    """
    return wait_for(paths, until, timeout_s, quiet=quiet, as_json=as_json)


def wait_for(
    paths: tuple[str, ...], until: str, timeout_s: float | None, *, quiet: bool, as_json: bool
) -> int:
    """The exit status of `ckptfs wait`."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    late: list[tuple[Target, Answer]] = []
    skipped: list[tuple[Target, Answer]] = []
    with Bar("waiting", quiet=quiet or as_json) as bar:
        uploads = UploadBar(bar)
        for target in list(targets(paths)):
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            request = Request("wait", target.relative, timeout_s=left_s, until=until)
            for answer in asked(target, request):
                uploads.show(answer.progress)
            if answer.counts.get("skipped"):
                skipped.append((target, answer))
            elif answer.timed_out:
                late.append((target, answer))
    if as_json:
        _print_waited(late, skipped)
    else:
        for target, answer in skipped:
            _say_skipped(target, answer)
        for target, answer in late:
            count = answer.counts["unsaved"]
            say_error(f"{target.path}: timed out; {count} not durable:")
            _list_unsaved(answer.unsaved, count)
    return EXIT_FAILED if skipped else EXIT_TIMED_OUT if late else 0


def _say_skipped(target: Target, answer: Answer) -> None:
    report = next(each for each in answer.unsaved if each.state == "skipped")
    more = answer.counts["skipped"] - 1
    others = f", and {more} more" if more else ""
    say_error(
        f"{target.path}: policy does not make {plain_text(report.key)} durable{others} "
        f"({plain_text(report.reason)}); `ckptfs persist {target.path}` does"
    )


def _list_unsaved(unsaved: list[UnsavedReport], count: int) -> None:
    for report in unsaved[:LISTED]:
        click.echo(unsaved_line(report), err=True)
    if count > LISTED:
        click.echo(f"  ... and {count - LISTED} more", err=True)


def _print_waited(late: list[tuple[Target, Answer]], skipped: list[tuple[Target, Answer]]) -> None:
    both = late + skipped
    print_json(
        {
            "reached": not both,
            "timed_out": bool(late),
            "unsaved_count": sum(answer.counts.get("unsaved", 0) for _, answer in both),
            "skipped_count": sum(answer.counts.get("skipped", 0) for _, answer in both),
            "unsaved": [unsaved_row(each) for _, answer in both for each in answer.unsaved],
        }
    )


@click.command()
@paths_argument
@click.option("--wait", "and_wait", is_flag=True, help="Return when it is durable.")
@click.option("--timeout", "timeout_s", type=Duration(), help="With --wait: give up after this.")
@quiet_option
@json_option
def persist(
    paths: tuple[str, ...], and_wait: bool, timeout_s: float | None, quiet: bool, as_json: bool
) -> int:
    """Upload PATHS, and all that is below them, now, whatever policy says.

    It is an order for what is there now. For what is to come: setfattr -n user.ckptfs.persist -v always PATH.

    Example: ckptfs persist /ckpt/step_100 --wait
    """
    changes = 0
    for target in list(targets(paths)):
        for answer in asked(target, Request("persist", target.relative)):
            changes += answer.counts.get("changes", 0)
    status = 0
    if and_wait:
        status = wait_for(paths, "durable", timeout_s, quiet=quiet, as_json=False)
    if as_json:
        print_json({"changes": changes, "durable": status == 0 if and_wait else None})
    elif not quiet and status == 0:
        done = "uploaded" if and_wait else "to be uploaded now"
        click.echo(f"{changes} changes {done}" if changes else "nothing to upload")
    return status


@click.command()
@paths_argument
@click.option("-r", "--recursive", is_flag=True, help="All files below a directory.")
@quiet_option
@json_option
def evict(paths: tuple[str, ...], recursive: bool, quiet: bool, as_json: bool) -> int:
    """Give the memory of PATHS back; their bytes are read from the durable tier when they are wanted.

    Exit status: 1 when anything stays (it is open, not durable, or pinned).

    Example: ckptfs evict -r /ckpt/step_100
    """
    totals = {"evicted": 0, "evicted_bytes": 0, "kept": 0}
    kept: list[tuple[Target, FileResult]] = []
    for target in list(targets(paths)):
        for answer in asked(target, Request("evict", target.relative, recursive=recursive)):
            kept += [(target, result) for result in answer.results]
        _add(totals, answer.counts)
    if as_json:
        print_json(totals | {"files": _plain_results(kept)})
    else:
        for target, result in kept[:LISTED]:
            say_error(f"{_place(target, result)}: stays in memory: {result.text}")
        if len(kept) > LISTED:
            say_error(f"... and {len(kept) - LISTED} more stay")
        if not quiet:
            freed = size_text(totals["evicted_bytes"])
            click.echo(f"evicted {_files(totals['evicted'])} ({freed})")
    return EXIT_FAILED if kept else 0


@click.command()
@paths_argument
@quiet_option
@json_option
def prefetch(paths: tuple[str, ...], quiet: bool, as_json: bool) -> int:
    """Bring the bytes of PATHS, and of all files below them, into memory.

    Exit status: 1 when a file could not be fetched.

    Example: ckptfs prefetch /ckpt/step_100
    """
    totals, results = _each("prefetch", "fetching", paths, quiet or as_json)
    if as_json:
        print_json(totals | {"results": _plain_results(results)})
    else:
        for target, result in results:
            say_error(f"{_place(target, result)}: {result.text}")
        if not quiet:
            click.echo(f"fetched {_files(totals['done'])} ({size_text(totals['done_bytes'])})")
    return EXIT_FAILED if totals["failed"] else 0


@click.command()
@paths_argument
@click.option("--all", "all_files", is_flag=True, help="List the files that are whole, too.")
@quiet_option
@json_option
def verify(paths: tuple[str, ...], all_files: bool, quiet: bool, as_json: bool) -> int:
    """Read every copy of PATHS, and of all files below them, again and compare.

    Exit status: 1 when a copy is damaged, or could not be read.

    Example: ckptfs verify /ckpt/step_100
    """
    totals, results = _each("verify", "verifying", paths, quiet or as_json)
    bad = [each for each in results if each[1].outcome not in GOOD]
    if as_json:
        print_json(totals | {"bad": len(bad), "results": _plain_results(results)})
    else:
        _print_verified(results if all_files else bad)
        if not quiet:
            what = f"{len(bad)} not whole" if bad else "all whole"
            click.echo(f"verified {_files(len(results))} ({size_text(totals['bytes'])}): {what}")
    return EXIT_FAILED if bad else 0


GOOD = ("ok", "changed")  # changed: rewritten while it was looked at


def _print_verified(results: list[tuple[Target, FileResult]]) -> None:
    if not results:
        return
    table = Table("result", "size", "path", "what", box=None)
    table.columns[1].justify = "right"
    for target, result in results:
        style = "" if result.outcome in GOOD else "red"
        table.add_row(
            Text(result.outcome, style=style),
            size_text(result.size_bytes),
            Text(_place(target, result)),
            Text(plain_text(result.text)),
        )
    print_table(table)


def _each(
    command: str, title: str, paths: tuple[str, ...], quiet: bool
) -> tuple[dict[str, int], list[tuple[Target, FileResult]]]:
    totals = {"files": 0, "bytes": 0, "done": 0, "done_bytes": 0, "failed": 0}
    results: list[tuple[Target, FileResult]] = []
    with Bar(title, quiet=quiet) as bar:
        for target in list(targets(paths)):
            for answer in asked(target, Request(command, target.relative)):
                results += [(target, result) for result in answer.results]
                told = answer.progress
                if told:
                    text = f"{told['done']} of {told['files']} files, {short(target.path)}"
                    bar.show(told["done_bytes"], told["bytes"], text)
            _add(totals, answer.counts)
    return totals, results


@click.command()
@click.argument("path")
@json_option
def unsaved(path: str, as_json: bool) -> int:
    """What is not durable at or below PATH, since when, and why.

    Example: ckptfs unsaved /ckpt
    """
    by_key: dict[str, UnsavedReport] = {}  # a key may wait for more than one change
    target = _target(path)
    cookie = 0
    while True:
        for answer in asked(target, Request("unsaved", target.relative, cookie)):
            for report in answer.unsaved:
                by_key.setdefault(report.key, report)
        cookie = answer.next_cookie
        if not cookie:
            break
    reports = list(by_key.values())
    if as_json:
        print_json({"path": path, "unsaved": [unsaved_row(report) for report in reports]})
        return 0
    table = Table("state", "size", "age", "path", "reason", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    for report in reports:
        table.add_row(
            report.state,
            size_text(report.size_bytes) if report.size_bytes else "",
            age_text(report.since_ns),
            Text(plain_text(report.key)),
            Text(plain_text(report.reason)),
        )
    if reports:
        print_table(table)
    return 0


def _add(totals: dict[str, int], counts: dict[str, int]) -> None:
    for name in totals:
        totals[name] += counts.get(name, 0)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _place(target: Target, result: FileResult) -> str:
    return os.path.join(target.run.mountpoint(), plain_text(plain_name(result.path)))


def _plain_results(results: list[tuple[Target, FileResult]]) -> list[dict[str, Any]]:
    return [
        {
            "path": _place(target, result),
            "outcome": result.outcome,
            "text": result.text,
            "size_bytes": result.size_bytes,
        }
        for target, result in results
    ]


COMMANDS: tuple[click.Command, ...] = (wait, persist, evict, prefetch, verify, unsaved)
