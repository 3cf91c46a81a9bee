"""A histogram that takes one value, or all values of a step in one call."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt


class Histogram:
    """Counts by upper bound, as Prometheus defines them: a value belongs to the first bound that is not below it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` rise. Values above the last one are counted too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Every one of `values`, [N]."""
        if not len(values):
            return
        first = values[0]
        if (values == first).all():
            # Of a batch that decodes, all branches have waited for the same step.
            self._counts[bisect_left(self._bounds, first)] += len(values)
        else:
            for place, count in enumerate(
                np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts)).tolist()
            ):
                self._counts[place] += count
        self._sum += float(values.sum())

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: `counts`, one a bound and one for what is above, and `sum`."""
        return {"counts": list(self._counts), "sum": self._sum}
