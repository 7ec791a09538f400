"""Names that are moved on before anything of it is in the tier, of files whose bytes are nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.discovery_node import DiscoveryNode, filled
from tests.durable_node import contents, run

THERE = {"x": b"x", "d/f": b"d/f"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["mv x y", "mv y x"], {"x": b"x", "d/f": b"d/f"}),
        (["mv d e", "mkdir d", "mv e/f d/f"], {"x": b"x", "d/": b"", "d/f": b"d/f", "e/": b""}),
        (["mv x y", "write x", "mv y z"], {"x": b"new", "z": b"x", "d/f": b"d/f"}),
        (["mv x y", "write x", "mv y x"], {"x": b"x", "d/f": b"d/f"}),
        (["mv x y", "write x", "rm y"], {"x": b"new", "d/f": b"d/f"}),
        (["mv x y", "ln y z", "rm y"], {"z": b"x", "d/f": b"d/f"}),
        (["mv x t", "mv d/f x", "mv t d/f"], {"x": b"d/f", "d/f": b"x", "d/": b""}),
        (
            ["mv x d/x", "mv d e", "mkdir d", "mv e/x d/f"],
            {"d/": b"", "d/f": b"x", "e/": b"", "e/f": b"d/f"},
        ),
    ],
    ids=lambda value: "; ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("restarts", [False, True])
def test_nothing_is_lost_by_moving_it_on(
    tmp_path: Path, steps: list[str], expected: dict[str, bytes], restarts: bool
) -> None:
    tier = filled(THERE)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        for step in steps:
            command, *paths = step.split()
            if command == "write":
                await node.write(paths[0], b"new")
            else:
                call = {
                    "mv": node.rename,
                    "ln": node.link,
                    "rm": node.unlink,
                    "mkdir": node.mkdir,
                }[command]
                await call(*paths)  # type: ignore[operator]
            if restarts:
                node.close()
                node = DiscoveryNode(tmp_path, tier)
        async with node.running():
            await node.drained()
            assert contents(tier) == expected
            for path in expected:
                if not path.endswith("/"):
                    assert await node.read(path) == expected[path]
        node.close()

    run(main)
