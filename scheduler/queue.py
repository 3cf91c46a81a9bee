"""Groups in order of service: lower priority number first, first come first served within one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.scheduler.sequence import SequenceGroup


class GroupQueue:
    """A list kept in `SequenceGroup.order`. Serves the waiting, and the running in their order of plans.

    Insertion and removal search in O(log n); a parked request finds its old place again, ahead of later ones.
    """

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    @property
    def head(self) -> SequenceGroup | None:
        return self._groups[0] if self._groups else None

    def add(self, group: SequenceGroup) -> None:
        insort(self._groups, group, key=lambda other: other.order)

    def remove(self, group: SequenceGroup) -> None:
        at = bisect_left(self._groups, group.order, key=lambda other: other.order)
        assert at < len(self._groups), f"{group.request.request_id} is not queued"
        assert self._groups[at] is group, f"{group.request.request_id} is not queued"
        del self._groups[at]
