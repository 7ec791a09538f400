"""A real S3 store for tests: one Ceph monitor, one OSD in memory and one gateway (RGW), on loopback.

What it keeps true: everything lies below one directory and carries its name, so that the harness finds what a killed
run left; each process is ended by its own pid, and dies by itself when the test process does. Nothing outlives the
session, buckets included, so nobody has to clean up in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

COMMANDS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
REGION = "us-east-1"
MEMORY_BYTES = 5 << 30  # the OSD takes memory only for what is stored
START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0
START_ATTEMPTS = 3  # another process may have taken a port in between
PR_SET_PDEATHSIG = 1

# Without mon client mode=crc the gateway never connects; without the paxos intervals creating a user takes 8 s, and
# without tcp_nodelay a small GET 46 ms.
CONFIG = """\
[global]
fsid={fsid}
mon host=[v2:127.0.0.1:{mon_port}]
public addr=127.0.0.1
cluster addr=127.0.0.1
auth cluster required=none
auth service required=none
auth client required=none
ms mon client mode=crc
keyring={base}/keyring
run dir={base}/state
log file={base}/$name.log
crash dir={base}/crash
admin socket=
pid file=
osd pool default size=1
osd pool default min size=1
osd pool default pg num=1
osd pool default pg autoscale mode=off
mon allow pool size one=true
[mon]
mon data={base}/mon
mon cluster log file={base}/cluster.log
mon data avail crit=1
paxos propose interval=0.02
paxos min wait=0.01
[osd]
osd data={base}/osd
osd objectstore=memstore
memstore device bytes={memory_bytes}
osd class update on start=false
[client]
rgw data={base}/rgw
rgw frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw gc obj min wait=1
rgw gc processor period=2
"""

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """A reason why no gateway can be started here, or None."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return (
            f"Ceph is not installed ({', '.join(missing)} missing): "
            "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
        )
    return None


class User(NamedTuple):
    """Who may sign requests. A new one owns no bucket and may do nothing in those of others."""

    access_key: str
    secret_key: str


class Rgw:
    """A gateway that runs. `start` makes one; `close` ends it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.access_key = "AKIACKPTFSTESTS00000"
        self.secret_key = secrets.token_hex(20)
        self.port = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count(1)

    @classmethod
    def start(cls, base: Path) -> Rgw:
        """Start all below *base*, which must be new. Raises AssertionError with the logs' ends."""
        for attempts_left in reversed(range(START_ATTEMPTS)):
            rgw = cls(base)
            try:
                rgw._start()
                return rgw
            except (OSError, AssertionError) as error:
                logs = rgw._log_ends()
                rgw.close()
                if not attempts_left:
                    raise AssertionError(f"Ceph did not start: {error}\n{logs}") from error
            except BaseException:
                rgw.close()
                raise
        raise AssertionError("not tried")

    @property
    def endpoint_url(self) -> str:
        """http://127.0.0.1:PORT."""
        return f"http://127.0.0.1:{self.port}"

    def credentials_env(self, user: User | None = None) -> dict[str, str]:
        """What a process needs in its environment to use the gateway, and nothing else of the user's own.

        The endpoint is not in it: tests give that to whom they want.
        """
        user = user or User(self.access_key, self.secret_key)
        return {
            "AWS_ACCESS_KEY_ID": user.access_key,
            "AWS_SECRET_ACCESS_KEY": user.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }

    def client(
        self, endpoint_url: str | None = None, user: User | None = None, **config: Any
    ) -> Any:
        """A boto3 client of its own: to look at a bucket as anybody would. *config*: of botocore's Config."""
        user = user or User(self.access_key, self.secret_key)
        session = botocore.session.Session()
        session.register_component("data_loader", _loader())
        # Named in full, so that nothing in the tests' environment changes it.
        return boto3.session.Session(botocore_session=session).client(
            "s3",
            endpoint_url=endpoint_url or self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=user.access_key,
            aws_secret_access_key=user.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ).merge(Config(**config)),
        )

    @functools.cached_property
    def owner(self) -> Any:
        """A boto3 client for whoever needs none of his own."""
        return self.client()

    def new_bucket(self) -> str:
        """The name of an empty bucket that nobody else uses."""
        name = f"bucket-{next(self._numbers)}"
        self.owner.create_bucket(Bucket=name)
        return name

    def add_user(self) -> User:
        """Another user, who may do nothing in the buckets of `new_bucket`."""
        number = next(self._numbers)
        user = User(f"AKIACKPTFSOTHER{number:05}", secrets.token_hex(20))
        self._create_user(f"other-{number}", user)
        return user

    @functools.cache  # noqa: B019 (there is one gateway)
    def second_key(self) -> User:
        """Other credentials of the user who owns the buckets, as after a rotation."""
        user = User("AKIACKPTFSAGAIN00000", secrets.token_hex(20))
        self._command(
            *("radosgw-admin", "-n", "client.rgw", "key", "create", "--uid=tests"),
            *(f"--access-key={user.access_key}", f"--secret={user.secret_key}"),
        )
        return user

    def close(self) -> None:
        """End every process and remove all files. Also of a gateway that did not come up."""
        # Killed: asked to end, the OSD would first write its gigabytes of memory to disk.
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait(COMMAND_TIMEOUT_S)
        self._processes.clear()
        shutil.rmtree(self.base, ignore_errors=True)

    # starting

    def _start(self) -> None:
        # `run`: the harness looks for this directory's name in command lines.
        run = self.base / "run"
        for name in ("mon", "osd", "rgw", "state", "crash"):
            (run / name).mkdir(parents=True)
        (run / "keyring").touch()
        mon_port, self.port = free_ports(2)
        self._config = run / "ceph.conf"
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        self._config.write_text(
            CONFIG.format(
                fsid=fsid, base=run, mon_port=mon_port, port=self.port, memory_bytes=MEMORY_BYTES
            )
        )
        map_file = str(run / "monmap")
        monitors = f"[v2:127.0.0.1:{mon_port}]"
        _run(
            [
                *("monmaptool", "--create", "--fsid", fsid, "--set-min-mon-release", "16"),
                *("--addv", "a", monitors, map_file),
            ]
        )
        self._command("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_file)
        self._daemon("ceph-mon", "-i", "a", "-f")
        self._command("ceph", "osd", "new", osd_id, "0")
        self._command("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        self._daemon("ceph-osd", "-i", "0", "-f")
        self._daemon("radosgw", "-n", "client.rgw", "-f")
        self._wait_for_answer()
        self._create_user("tests", User(self.access_key, self.secret_key))

    def _create_user(self, uid: str, user: User) -> None:
        self._command(
            *("radosgw-admin", "-n", "client.rgw", "user", "create"),
            *(f"--uid={uid}", f"--display-name={uid}"),
            *(f"--access-key={user.access_key}", f"--secret={user.secret_key}"),
        )

    def _command(self, command: str, *args: str) -> None:
        _run([command, "-c", str(self._config), *args])

    def _daemon(self, command: str, *args: str) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with (self.base / "run" / f"{command}.out").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [command, "-c", str(self._config), *args],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent,
                )
            )

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.port):
            for process in self._processes:
                if process.poll() is not None:
                    raise AssertionError(f"{process.args!r} ended with {process.returncode}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no answer within {START_TIMEOUT_S} s")
            time.sleep(0.02)

    def _log_ends(self) -> str:
        ends = []
        for file in sorted((self.base / "run").glob("*.*")):
            if file.suffix in (".out", ".log") and file.stat().st_size:
                ends.append(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}")
        return "\n".join(ends)


@functools.cache
def _loader() -> Any:
    # Reading botocore's description of S3 takes a quarter of a second: once for all.
    return botocore.loaders.create_loader()


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on.

    Below the range from which the kernel takes the ports of outgoing connections, so that none is taken by chance
    before a server listens on it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (10_000, first) if first > 12_000 else (20_000, 60_000)
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(low, high)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _run(args: Sequence[str]) -> None:
    try:
        subprocess.run(
            args,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{args[0]}: no end within {COMMAND_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        output = error.stdout.decode(errors="replace")[-1500:]
        raise AssertionError(f"{args[0]} ended with {error.returncode}: {output}") from error
