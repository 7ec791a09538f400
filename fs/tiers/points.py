"""A tier with named points before and after each call, at which tests of crashes end the process."""

from __future__ import annotations

from typing import Any

from fs.catalog import Fault
from fs.tiers.tier import Tier

_CALLS = frozenset("put start put_part complete abort copy delete head read_into list".split())


class PointsTier:
    """*tier*, with `fault("tier:CALL:before")` and `fault("tier:CALL:after")` around each call."""

    def __init__(self, tier: Tier, fault: Fault) -> None:
        self._tier = tier
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tier, name)
        if name not in _CALLS:
            return found

        def pointed(*args: Any, **kwargs: Any) -> Any:
            self._fault(f"tier:{name}:before")
            result = found(*args, **kwargs)
            self._fault(f"tier:{name}:after")
            return result

        return pointed
