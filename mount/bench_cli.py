"""The command `ckptfs bench`."""

from __future__ import annotations

import signal
import sys

import click
import msgspec
from rich.console import Console

from mount.bench import BenchOptions, run_bench
from mount.bench_report import BenchReport, goals_table, measures_table


def _stop(*_: object) -> None:
    raise KeyboardInterrupt  # an ordered end, with everything cleaned up


@click.command()
@click.argument("mountpoint")
@click.option(
    "--dir",
    "directories",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Measure this directory too (repeatable).",
)
@click.option("--size-mib", default=512, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--operations",
    default=500,
    show_default=True,
    type=click.IntRange(min=1),
    help="Metadata operations a round.",
)
@click.option("--entries", default=10_000, show_default=True, help="Files in the listed directory.")
@click.option("--restarts", default=20, show_default=True, help="Kills of the worker.")
@click.option("--no-restarts", is_flag=True, help="Leave the worker alone.")
@click.option(
    "--memory-files", default=0, help="Measure the memory a file takes with that many (0: do not)."
)
@click.option("--torch-python", help="A Python that can import torch (default: this one).")
@click.option("--no-torch", is_flag=True, help="Skip torch.save and torch.load.")
@click.option("--no-baseline", is_flag=True, help="Skip the bare pyfuse3 filesystem.")
@click.option("--seed", type=int, help="Repeat an order of measurements.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, with every sample.")
def bench(
    mountpoint: str,
    directories: tuple[str, ...],
    size_mib: int,
    rounds: int,
    operations: int,
    entries: int,
    restarts: int,
    no_restarts: bool,
    memory_files: int,
    torch_python: str | None,
    no_torch: bool,
    no_baseline: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    """Measure MOUNTPOINT beside its raw arena, /dev/shm and a bare pyfuse3 filesystem.

    Let nothing else run meanwhile. The worker is killed on purpose (--no-restarts: it is not).

    Example: ckptfs bench /ckpt --torch-python /path/to/venv/bin/python
    """
    options = BenchOptions(
        mountpoint=mountpoint,
        directories=directories,
        size_bytes=size_mib << 20,
        rounds=rounds,
        operations=operations,
        entries=entries,
        restarts=0 if no_restarts else restarts,
        memory_files=memory_files,
        torch_python=torch_python,
        torch=not no_torch,
        baseline=not no_baseline,
        seed=seed,
    )
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        report = run_bench(options, lambda text: click.echo(f"{text} ...", err=True))
    finally:
        signal.signal(signal.SIGTERM, previous)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    for facts in (report.machine, report.settings):
        click.echo(", ".join(f"{key}: {value}" for key, value in facts.items() if value))
    console.print(measures_table(report))
    console.print(goals_table(report))
    for note in report.notes:
        click.echo(f"note: {note}")
