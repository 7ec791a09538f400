"""The command `ckptfs`. What it keeps true: a failure is one line on stderr and an exit status that
docs and scripts can rely on, never a traceback."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from fs.errors import CkptfsError
from mount import config, control, durable_cli, helper, lifecycle, rundir
from mount.bench_cli import bench
from mount.doctor_cli import doctor
from mount.progress import trouble_text
from mount.terminal import (
    EXIT_BUSY,
    EXIT_FAILED,
    EXIT_NO_MOUNT,
    EXIT_NOT_DURABLE,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    age_text,
    duration_text,
    plain_name,
    plain_text,
    print_json,
    print_table,
    size_text,
)
from mount.umount_cli import umount

_STATUS_OF = (
    (config.ConfigError, EXIT_USAGE),
    (rundir.NoSuchMount, EXIT_NO_MOUNT),
    (lifecycle.Busy, EXIT_BUSY),
    (lifecycle.TimedOut, EXIT_TIMED_OUT),
    (lifecycle.NotDurable, EXIT_NOT_DURABLE),
)


def _version() -> str:
    try:
        return importlib.metadata.version("ckptfs")
    except importlib.metadata.PackageNotFoundError:
        return "(from a checkout)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), message="ckptfs %(version)s")
def cli() -> None:
    """A filesystem for training checkpoints, in RAM.

    Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 3 no such mount, 4 busy,
    5 timed out, 6 something is not durable.
    """


@cli.command()
@click.argument("mountpoint")
@click.option("--size", help="The arena's size: 8GiB, or 50% of this node's RAM (the default).")
@click.option("--name", help="The mount's name (default: made from the path).")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="A TOML file.")
@click.option("--foreground", is_flag=True, help="Do not go to the background; log to stderr.")
@click.option(
    "--allow-plain/--require-passthrough",
    default=None,
    help="Without kernel passthrough: serve in the plain lane (default), or fail.",
)
@click.option("--force-plain", is_flag=True, default=None, help="Do not use kernel passthrough.")
@click.option("--nonempty", is_flag=True, help="Mount over a directory that is not empty.")
@click.option("--durable", hidden=True, help="A tier to write to: s3://BUCKET/PREFIX, file:///DIR.")
@click.option("--set-aside", is_flag=True, help="Rename a kept arena and begin with an empty one.")
def mount(
    mountpoint: str,
    size: str | None,
    name: str | None,
    config_path: Path | None,
    foreground: bool,
    allow_plain: bool | None,
    force_plain: bool | None,
    nonempty: bool,
    set_aside: bool,
    durable: str | None,
) -> None:
    """Mount at MOUNTPOINT; returns when the filesystem answers.

    Example: ckptfs mount /ckpt --size 64GiB
    """
    flags = {
        "durable": durable,
        "size": size,
        "name": name,
        "require_passthrough": None if allow_plain is None else not allow_plain,
        "force_plain": force_plain,
    }
    settings = config.load(config_path, flags)
    lane = lifecycle.mount(
        mountpoint, settings, foreground=foreground, nonempty=nonempty, set_aside=set_aside
    )
    click.echo(f"ckptfs on {mountpoint} ({lane} lane)")


@cli.command()
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(mountpoint: str | None, as_json: bool) -> None:
    """What is mounted, how full it is, and which processes serve it.

    Example: ckptfs status /ckpt --json
    """
    if mountpoint is not None:
        report = _status(rundir.find(mountpoint))
        print_json(report) if as_json else _print_status([report])
        return
    reports = [_status(run) for run in rundir.all_run_dirs()]
    if as_json:
        print_json({"mounts": reports})
    elif reports:
        _print_status(reports)
    else:
        click.echo("no ckptfs mounts")


def _status(run: rundir.RunDir) -> dict[str, Any]:
    report: dict[str, Any] = {
        "name": run.name,
        "mountpoint": run.mountpoint(),
        "state": run.state(),
    }
    supervisor = run.supervisor()
    if supervisor is None:
        if run.arena.is_dir():
            usage = shutil.disk_usage(run.arena)
            report["arena"] = {"path": str(run.arena), "used_bytes": usage.used}
        return report
    report |= msgspec.to_builtins(supervisor)
    try:
        report |= control.ask(run.control, control.Request("status")).status
    except CkptfsError as error:
        report["error"] = str(error)
    return report


def _print_status(reports: list[dict[str, Any]]) -> None:
    table = Table(
        "name", "mountpoint", "state", "lane", "used", "size", "files", "restarts", box=None
    )
    for report in reports:
        arena = report.get("arena", {})
        if not isinstance(arena, dict):
            arena = {}
        table.add_row(
            report["name"],
            report["mountpoint"],
            report["state"],
            report.get("lane", ""),
            size_text(arena.get("used_bytes")),
            size_text(arena.get("size_bytes")),
            str(report.get("files", "")),
            str(report.get("worker_restarts", "")),
        )
    print_table(table)
    for report in reports:
        if report["state"] == "dead":
            click.echo(
                f"{report['name']}: its supervisor is gone; `ckptfs mount` brings the files back"
            )
        if report.get("durable") is not None:
            _print_durable(report["name"], report["durable"])
        if "error" in report:
            click.echo(f"{report['name']}: {report['error']}", err=True)


def _print_durable(name: str, durable: dict[str, Any]) -> None:
    what = "everything is there"
    if durable["pending_rows"]:
        age = duration_text(durable["oldest_age_s"] or 0)
        what = f"{durable['pending_rows']} left to upload ({size_text(durable['pending_bytes'])}), "
        what += f"the oldest for {age}"
    if durable["draining"]:
        what += ", draining"
    if durable["uploading"]:
        what += f", {len(durable['uploading'])} being uploaded"
    click.echo(f"{name}: durable tier {durable['tier']}: {what}")
    for trouble in durable["troubles"]:
        text = f"{name}: trouble with {plain_text(trouble['key'])}: {trouble_text(trouble)}"
        click.echo(click.style(text, fg="red"))
    more = durable["trouble_count"] - len(durable["troubles"])
    if more > 0:
        click.echo(click.style(f"{name}: ... and {more} more", fg="red"))


@cli.command()
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def ls(path: str, as_json: bool) -> None:
    """Where the bytes of PATH (a file, or a directory's entries) are.

    STATE is writing (open for it), local (in memory only), uploading, held (policy lets it wait), skipped (policy does
    not want it), durable (in memory and the durable tier) or remote (in the durable tier only); AGE is for how long a
    change has not been durable.

    Example: ckptfs ls /ckpt/step_100
    """
    run, relative = rundir.find_by_path(path)
    if not run.is_live():
        raise rundir.NoSuchMount(f"{path}: its supervisor is gone; `ckptfs mount` brings it back")
    arena = run.arena / "data"
    entries = list(_entries(run, relative))
    if as_json:
        print_json({"path": path, "arena": str(arena), "entries": [_plain(e) for e in entries]})
        return
    columns = (
        "kind",
        "size",
        "in memory",
        "generation",
        "state",
        "age",
        "modified",
        "name",
        "backing",
    )
    table = Table(*columns, box=None)
    for column in (*table.columns[1:4], table.columns[5]):
        column.justify = "right"
    for entry in entries:
        modified = datetime.datetime.fromtimestamp(entry.mtime_ns / 1e9)
        is_file = entry.kind == "file"
        table.add_row(
            entry.kind,
            size_text(entry.size_bytes) if is_file else "",
            size_text(entry.memory_bytes) if is_file else "",
            str(entry.generation) if is_file else "",
            entry.state,
            age_text(entry.since_ns),
            modified.strftime("%Y-%m-%d %H:%M:%S"),
            Text(plain_name(entry.name)),
            f"data/{entry.ino}" if is_file else "",
        )
    print_table(table)
    click.echo(f"backing files are in {run.arena}")


def _entries(run: rundir.RunDir, relative: str) -> Iterator[control.FileReport]:
    cookie = 0
    while True:
        request = control.Request("ls", os.fsencode(relative), cookie)
        answer = control.ask(run.control, request)
        yield from answer.entries
        cookie = answer.next_cookie
        if not cookie:
            return


def _plain(entry: control.FileReport) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(entry)
    return fields | {"name": plain_name(entry.name)}


@cli.command()
@click.argument("mountpoint")
@click.option("--timeout", "timeout_s", default=30.0, show_default=True, help="Seconds to wait.")
def restart(mountpoint: str, timeout_s: float) -> None:
    """Let a fresh worker take over, under load: after an upgrade, for example.

    Example: ckptfs restart /ckpt
    """
    before, after = lifecycle.restart(mountpoint, timeout_s=timeout_s)
    click.echo(f"worker {before} -> {after}")


@cli.command("install-helper")
@click.option("--directory", default="/sbin", show_default=True)
def install_helper(directory: str) -> None:
    """Let mount(8) and /etc/fstab know the type fuse.ckptfs.

    Example: ckptfs install-helper && mount -t fuse.ckptfs ckptfs /ckpt -o size=64GiB
    """
    click.echo(f"installed {helper.install(Path(directory))}")


for _command in (bench, doctor, umount, *durable_cli.COMMANDS):
    cli.add_command(_command)


def run(command: click.Command, arguments: list[str]) -> int:
    """Run a command; its exit status. Failures are one line on stderr."""
    try:
        result = command.main(args=arguments, prog_name="ckptfs", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        click.echo("ckptfs: interrupted", err=True)
        return EXIT_FAILED
    except click.UsageError as error:
        error.show()
        return EXIT_USAGE
    except click.ClickException as error:
        click.echo(f"ckptfs: {error.format_message()}", err=True)
        return EXIT_FAILED
    except CkptfsError as error:
        click.echo(f"ckptfs: {error}", err=True)
        return next((code for kind, code in _STATUS_OF if isinstance(error, kind)), EXIT_FAILED)
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        click.echo(f"ckptfs: {path}{error.strerror or error}", err=True)
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get("CKPTFS_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        click.echo(f"ckptfs: a fault of ours: {what} (CKPTFS_DEBUG=1 shows where)", err=True)
        return EXIT_FAILED


def main() -> None:
    """Entry point of `ckptfs`."""
    sys.exit(run(cli, sys.argv[1:]))


def mount_helper() -> None:
    """Entry point of `mount.fuse.ckptfs`, which mount(8) calls."""
    try:
        arguments = helper.translate(sys.argv[1:])
    except CkptfsError as error:
        click.echo(f"mount.fuse.ckptfs: {error}", err=True)
        sys.exit(EXIT_FAILED)
    sys.exit(run(cli, arguments))


if __name__ == "__main__":
    main()
