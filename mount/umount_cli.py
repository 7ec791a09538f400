"""The command `ckptfs umount`: drain, unmount, say what is not durable.

What it keeps true: what is durable is looked at in the index after the mount's end, when nothing changes any more; its
exit status says whether anything is left. Bytes that are nowhere else are only erased when that is forced.
"""

from __future__ import annotations

import shutil
from typing import Any

import click

from fs.errors import CkptfsError
from mount import control, lifecycle, rundir
from mount.control import Answer, Request, UnsavedReport
from mount.durable_cli import answers, quiet_option, say_error, unsaved_line
from mount.leftover import Left, Leftover
from mount.progress import Bar, UploadBar
from mount.terminal import EXIT_NOT_DURABLE, Duration, age_text, plain_text, size_text

LISTED = 20


@click.command()
@click.argument("mountpoint")
@click.option(
    "--timeout", "timeout_s", default=10.0, show_default=True, help="Seconds to wait for its users."
)
@click.option("--force", is_flag=True, help="Detach although it is in use.")
@click.option("--discard", is_flag=True, help="Also erase the arena: every file in it.")
@click.option(
    "--drain-timeout",
    "drain_s",
    type=Duration(),
    help="With a durable tier: upload what is left for at most this long (default: umount_drain_s).",
)
@click.option("--no-drain", is_flag=True, help="Upload nothing more now.")
@quiet_option
def umount(
    mountpoint: str,
    timeout_s: float,
    force: bool,
    discard: bool,
    drain_s: float | None,
    no_drain: bool,
    quiet: bool,
) -> int:
    """Unmount MOUNTPOINT. The arena is kept in RAM until --discard.

    With a durable tier, what is left is uploaded first. Exit status 6: something is not durable (it is listed); the
    arena is kept, and a later mount goes on uploading. --discard then refuses, and --discard --force erases it.

    Example: ckptfs umount /ckpt --drain-timeout 5m
    """
    run = rundir.find(mountpoint)
    has_tier, drained = True, Answer()
    if run.is_live():
        has_tier = _has_tier(run)
        if has_tier and not (force and discard):
            drained = _drain(run, 0.0 if no_drain else drain_s, quiet)
            if discard and drained.counts["unsaved"]:
                _refuse(run.mountpoint(), drained)
    done = lifecycle.umount(
        mountpoint, timeout_s=timeout_s, force=force, discard=discard, has_tier=has_tier
    )
    left = done.left
    if discard:
        click.echo(f"unmounted {mountpoint}; its arena is discarded")
        if left is not None and left.unsaved:
            say_error(
                f"{mountpoint}: {_changes(len(left.unsaved))} lost: not durable in {left.tier}"
            )
        if left is not None and not quiet:
            _say_skipped(left)
        return 0
    used = shutil.disk_usage(run.arena).used if run.arena.is_dir() else 0
    click.echo(
        f"unmounted {mountpoint}; its arena is kept ({size_text(used)} of RAM): mount it again, "
        f"or free it with `ckptfs umount {run.name} --discard`"
    )
    if left is None:
        return 0
    if not quiet:
        _say_skipped(left)
    if not left.unsaved:
        return 0
    _say_left(mountpoint, left, drained)
    return EXIT_NOT_DURABLE


def _has_tier(run: rundir.RunDir) -> bool:
    try:
        return control.ask(run.control, Request("status")).status.get("durable") is not None
    except CkptfsError:
        return True  # the index tells


def _drain(run: rundir.RunDir, drain_s: float | None, quiet: bool) -> Answer:
    answer = Answer()
    try:
        with Bar("draining", quiet=quiet) as bar:
            uploads = UploadBar(bar)
            for answer in answers(run, Request("drain", timeout_s=drain_s)):
                uploads.show(answer.progress)
    except CkptfsError as error:
        say_error(f"{run.mountpoint()}: could not drain: {error}")
    if not answer.final or not answer.counts:
        answer = Answer(counts={"unsaved": 0, "skipped": 0})  # the index tells
    return answer


def _refuse(mountpoint: str, drained: Answer) -> None:
    unsaved = [each for each in drained.unsaved if each.state != "skipped"]
    count = drained.counts["unsaved"]
    _list([unsaved_line(each) for each in unsaved], count)
    raise lifecycle.NotDurable(
        f"{mountpoint}: still mounted: {_changes(count)} would be lost, listed above; wait longer "
        "(--drain-timeout), unmount without --discard, or lose them with --force"
    )


def _say_skipped(left: Leftover) -> None:
    if left.skipped:
        click.echo(f"not kept by policy: {_changes(len(left.skipped))}")
        _list([_line(each) for each in left.skipped], err=False)


def _say_left(mountpoint: str, left: Leftover, drained: Answer) -> None:
    reasons: dict[str, UnsavedReport] = {each.key: each for each in drained.unsaved}
    say_error(
        f"{mountpoint}: {_changes(len(left.unsaved))} not durable in {left.tier}; "
        "the arena is kept, and a later mount goes on uploading:"
    )
    _list(
        [
            unsaved_line(reasons[e.key]) if e.key in reasons else _line(e)
            for e in left.unsaved[:LISTED]
        ],
        len(left.unsaved),
    )


def _line(left: Left) -> str:
    size = size_text(left.size) if left.size else ""
    facts = ", ".join(part for part in (size, age_text(left.since_ns)) if part)
    return f"  {plain_text(left.key)}" + (f" ({facts})" if facts else "") + f": {left.reason}"


def _list(lines: list[str], count: int | None = None, **echo: Any) -> None:
    count = len(lines) if count is None else count
    for line in lines[:LISTED]:
        click.echo(line, **({"err": True} | echo))
    if count > LISTED:
        click.echo(f"  ... and {count - LISTED} more", **({"err": True} | echo))


def _changes(count: int) -> str:
    return "1 change" if count == 1 else f"{count} changes"
