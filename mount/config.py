"""Settings of a mount: their defaults, a TOML file, flags; each value checked once, here.

What it keeps true: a Settings that exists is valid. Errors name the file or flag, the key, and what is
allowed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from fs.errors import CkptfsError
from fs.tiers.opening import check_url
from fs.tiers.options import BadTierSetting, S3Options

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_PERCENT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*%")
MIN_SIZE_BYTES = 16 << 20


class ConfigError(CkptfsError):
    """A setting that cannot be used (exit status 2)."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a mount can be told. Times in seconds."""

    size: str = "50%"
    durable: str = ""
    s3: dict[str, Any] = {}
    name: str = ""
    require_passthrough: bool = False
    force_plain: bool = False
    hang_timeout_s: float = 10.0
    give_up_s: float = 30.0
    stop_grace_s: float = 10.0

    def __post_init__(self) -> None:
        if self.require_passthrough and self.force_plain:
            raise ConfigError(
                "require_passthrough and force_plain contradict each other: choose one"
            )
        if self.name and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise ConfigError(
                f"name {self.name!r}: allowed are 1-64 letters, digits, '.', '_', '-'"
            )
        if self.name in (".", ".."):
            raise ConfigError(f"name {self.name!r} is not allowed")
        for field in ("hang_timeout_s", "give_up_s", "stop_grace_s"):
            value = getattr(self, field)
            if not 0.1 <= value <= 86400:
                raise ConfigError(f"{field} = {value}: allowed are 0.1 to 86400 seconds")
        parse_size(self.size, 1 << 40)
        if self.durable:
            check_url(self.durable)
            _checked_s3(self.s3)


def _checked_s3(values: dict[str, Any]) -> None:
    known = S3Options.__struct_fields__
    for key in values:
        if key not in known:
            raise ConfigError(f"[s3]: unknown key {key!r}; known are {', '.join(known)}")
    msgspec.convert(values, S3Options)


def parse_size(text: str, whole_bytes: int) -> int:
    """Bytes from "8GiB", "512M", "1073741824" or "50%" (of *whole_bytes*); units are powers of 1024."""
    if match := _PERCENT.fullmatch(text.strip()):
        percent = float(match["number"])
        if not 0 < percent <= 100:
            raise ConfigError(f"size {text!r}: a percentage is above 0 and at most 100")
        return int(whole_bytes * percent / 100)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"size {text!r}: write for example 8GiB, 512MiB or 50% (of this node's RAM)"
        )
    size_bytes = int(float(match["number"]) * _UNITS[match["unit"].upper()])
    if size_bytes < MIN_SIZE_BYTES:
        raise ConfigError(f"size {text!r}: at least {MIN_SIZE_BYTES >> 20}MiB are needed")
    return size_bytes


def load(path: Path | None, flags: dict[str, Any]) -> Settings:
    """Defaults < file < flags (those that are not None). Raises ConfigError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        known = Settings.__struct_fields__
        for key in values:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r}; known are {', '.join(known)}")
    values |= {key: value for key, value in flags.items() if value is not None}
    try:
        return msgspec.convert(values, Settings)
    except (msgspec.ValidationError, ConfigError, BadTierSetting) as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError(f"{where}{error}") from error
