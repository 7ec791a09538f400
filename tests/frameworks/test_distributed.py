"""torch.distributed.checkpoint from 1, 2 and 4 processes: every way of saving, loaded by any number of them.

jobs/dcp.py saves a sharded, a replicated and a rank's own state in eight ways (one file a rank or many, synced or not,
at once or in the background) and an FSDP2 model with its optimizer; whoever loads checks every value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import lib

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("lane", ["passthrough"], indirect=True)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_save_then_load(torch: Any, ckpt: Path, world_size: int) -> None:
    root = ckpt / f"world-{world_size}"
    lib.ranks("dcp", world_size, "save", root)
    assert len(list((root / "single1-sync1-async0").glob("*.distcp"))) == world_size
    assert len(list((root / "single0-sync1-async0").glob("*.distcp"))) > world_size
    if world_size == 2:
        # Twice as many ranks, and one alone.
        lib.ranks("dcp", 4, "load", root)
        lib.ranks("dcp", 1, "load", root)
    if world_size == 4:
        lib.ranks("dcp", 1, "load", root)
        lib.ranks("dcp", 2, "load", root)


@pytest.mark.parametrize("lane", ["plain"], indirect=True)
def test_on_the_plain_lane(torch: Any, ckpt: Path) -> None:
    lib.ranks("dcp", 2, "save", ckpt / "world-2")
    lib.ranks("dcp", 1, "load", ckpt / "world-2")
