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


def tokens_to_compute(group: SequenceGroup) -> int:
    """Prefill tokens of a group that waits, less those of its prompt that are or will be cached."""
    counts = [seq.num_uncomputed_tokens for seq in group.live]
    return max(0, sum(count for count in counts if count > 1) - group.found_tokens)


class ParkedQueue(GroupQueue):
    """Groups that wait or are swapped, with running totals: the router asks for them at every request."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        """To be computed before all of these run their next token; single ones are decodes and do not count."""
        self.num_branches = 0
        self._counted: dict[int, tuple[int, int]] = {}
        """Arrival number -> what of the totals is this group's."""

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        self._count(group)

    def remove(self, group: SequenceGroup) -> None:
        super().remove(group)
        self._forget(group)

    def recount(self, group: SequenceGroup) -> None:
        """A branch of a group that is in this queue came or went."""
        self._forget(group)
        self._count(group)

    def _count(self, group: SequenceGroup) -> None:
        tokens = tokens_to_compute(group)
        self._counted[group.arrival_number] = tokens, group.num_branches
        self.num_tokens += tokens
        self.num_branches += group.num_branches

    def _forget(self, group: SequenceGroup) -> None:
        tokens, branches = self._counted.pop(group.arrival_number)
        self.num_tokens -= tokens
        self.num_branches -= branches
