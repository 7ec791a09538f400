"""Fixtures: real mounts over both lanes, and a plain tmpfs to compare with.

Tests that touch a mount get the marker `mount` by the fixtures they use, so `-m "not mount and not slow"`
is the quick suite that needs neither root nor /dev/fuse. So do tests that use a real object store (`rgw`), besides
the marker `services`. Where those are missing such tests skip with the reason; with CI=true they fail, since a CI
that silently skips the mount tests nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests import rgw as rgw_module
from tests.faultproxy import FaultProxy
from tests.harness import Mount
from tests.posix.lib import end_children
from tests.rgw import Rgw

MOUNT_FIXTURES = {
    "lane",
    "_lane_mount",
    "ckpt",
    "mnt_obj",
    "make_mount",
    "both_lanes",
    "tmpfs_dir",
}
# A test without a timeout of its own gets this one; the guard ends the mount's daemons some time after it.
DEFAULT_TIMEOUT_S = 120.0
GUARD_GRACE_S = 15.0

_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    ops = int(os.environ.get("CKPTFS_SIDE_BY_SIDE_OPS", "400"))
    seed = os.environ.get("CKPTFS_SIDE_BY_SIDE_SEED")
    parser.addoption("--kills", type=int, default=26, help="random kills per load test")
    parser.addoption("--side-by-side-ops", type=int, default=ops, help="random operations per seed")
    parser.addoption(
        "--side-by-side-seed", type=int, default=seed and int(seed), help="repeat this seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mount: needs a real mount (root and /dev/fuse)")
    config.addinivalue_line("markers", "slow: takes long or much memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MOUNT_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.mount)
        if "rgw" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.services)
        # also where the fixture is asked for later, by name
        if item.get_closest_marker("services") is not None:
            item.add_marker(pytest.mark.mount)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEFAULT_TIMEOUT_S))


@pytest.fixture(scope="session")
def _guard() -> harness.Guard:
    return harness.Guard()


@pytest.fixture(autouse=True)
def _guarded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Count down for tests that use a mount."""
    if request.node.get_closest_marker("mount") is None:
        yield
        return
    guard = request.getfixturevalue("_guard")
    marker = request.node.get_closest_marker("timeout")
    timeout_s = marker.args[0] if marker and marker.args else DEFAULT_TIMEOUT_S
    guard.set((timeout_s or DEFAULT_TIMEOUT_S) + GUARD_GRACE_S)
    yield
    guard.set(None)


def _need(reason: str | None) -> None:
    if reason is None:
        return
    if harness.in_ci():
        pytest.fail(f"CI must be able to mount: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left() -> Iterator[None]:
    """No mount, process or directory of ours outlives the session; one that would is a failure."""
    harness.close_stale()
    yield
    left = harness.close_all()
    assert not left, f"mounts left by tests (now detached): {left}"


@pytest.fixture(scope="session", params=harness.LANES)
def lane(request: pytest.FixtureRequest) -> str:
    """The name of the lane: every test with this fixture runs over each."""
    name = str(request.param)
    _need(harness.why_no_passthrough() if name == "passthrough" else harness.why_no_fuse())
    return name


@pytest.fixture(scope="session")
def _mount_of(_nothing_left: None) -> Iterator[Callable[[str], Mount]]:
    """One mount per lane for the whole session, started when first asked for, again if a test broke it."""
    mounts: dict[str, Mount] = {}

    def get(lane_name: str) -> Mount:
        if lane_name in mounts and not mounts[lane_name].answers():
            mounts.pop(lane_name).close()
        if lane_name not in mounts:
            # Its tmpfs takes memory only for what is written.
            mounts[lane_name] = Mount.start(size="4GiB", lane=lane_name)
        return mounts[lane_name]

    yield get
    for mount in mounts.values():
        mount.close()


@pytest.fixture
def _lane_mount(lane: str, _mount_of: Callable[[str], Mount]) -> Mount:
    return _mount_of(lane)


@pytest.fixture
def mnt_obj(_lane_mount: Mount) -> Mount:
    """The shared Mount of this lane. A test that kills the supervisor or fills the arena wants `make_mount`."""
    return _lane_mount


@pytest.fixture
def ckpt(_lane_mount: Mount) -> Iterator[Path]:
    """A fresh directory on the mount, over both lanes; removed afterwards."""
    yield from _fresh_directory(_lane_mount.path)


@pytest.fixture
def both_lanes(_mount_of: Callable[[str], Mount]) -> dict[str, Mount]:
    """Both shared mounts at once, by lane, for tests that compare them."""
    _need(harness.why_no_passthrough())
    return {name: _mount_of(name) for name in harness.LANES}


@pytest.fixture
def make_mount() -> Iterator[Callable[..., Mount]]:
    """`make_mount(size=..., lane=..., extra_args=..., env=...)`: a mount of one's own, closed when the test ends."""
    _need(harness.why_no_fuse())
    made: list[Mount] = []

    def make(**kwargs: Any) -> Mount:
        if harness.why_no_passthrough() is not None:
            kwargs.setdefault("lane", "plain")
        made.append(Mount.start(**kwargs))
        return made[-1]

    yield make
    for mount in reversed(made):
        mount.close()


@pytest.fixture(scope="session")
def rgw(_nothing_left: None) -> Iterator[Rgw]:
    """A real S3 store on loopback, started when first asked for: tests.rgw says what it gives."""
    reason = rgw_module.why_not()
    if reason is not None and harness.in_ci():
        pytest.fail(f"CI must be able to start an object store: {reason}")
    if reason is not None:
        pytest.skip(reason)
    gateway = Rgw.start(harness.session_base() / "rgw")
    yield gateway
    gateway.close()


@pytest.fixture
def proxy(rgw: Rgw) -> Iterator[FaultProxy]:
    """A proxy before `rgw` that fails as it is told (tests.s3faults); a failure of its own fails the test."""
    with FaultProxy(rgw.port) as proxy:
        yield proxy
    assert proxy.errors == []


@pytest.fixture(scope="session")
def _tmpfs_root(_nothing_left: None) -> Iterator[Path]:
    _need(harness.why_no_fuse())
    root = harness.session_base() / "tmpfs"
    harness.mount_tmpfs(root)
    yield root
    harness.detach(str(root))


@pytest.fixture
def tmpfs_dir(_tmpfs_root: Path) -> Iterator[Path]:
    """A fresh directory on a plain tmpfs, the filesystem ours is held against."""
    yield from _fresh_directory(_tmpfs_root)


def _fresh_directory(parent: Path) -> Iterator[Path]:
    path = parent / f"d{next(_numbers)}"
    path.mkdir()
    # The tests' umask may be anything, and other users must get in.
    path.chmod(0o755)
    yield path
    end_children()
    # rm, not rmtree: some tests leave paths longer than PATH_MAX.
    done = subprocess.run(
        ["rm", "-rf", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert not os.path.lexists(path), f"rm -rf {path}: {done.stderr[-2000:]}"
