"""The command `ckptfs doctor`."""

from __future__ import annotations

import click
import msgspec

from mount.doctor import run_checks

_SIGNS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command()
@click.argument("mountpoint", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(mountpoint: str | None, as_json: bool) -> None:
    """Look for what would stop a mount, or make it slow; each finding with what to do.

    Exit status: 0 when nothing stops a mount, 1 otherwise.

    Example: ckptfs doctor
    """
    findings = run_checks(mountpoint)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"findings": findings}), indent=2))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            sign, colour = _SIGNS[finding.level]
            click.echo(f"{click.style(sign, fg=colour)}  {finding.check:{width}}  {finding.found}")
            if finding.advice:
                click.echo(f"      {'':{width}}  -> {finding.advice}")
    if any(finding.level == "fail" for finding in findings):
        raise click.exceptions.Exit(1)
