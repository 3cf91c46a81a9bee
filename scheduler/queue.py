"""Who is next: requests in order of service, and those that wait shared fairly among tenants.

Knows nothing of blocks, rows or budgets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.scheduler.sequence import SequenceGroup

OUTPUT_WEIGHT = 2
"""An output token is charged like so many prompt tokens: a step of its own, against a share of one."""


class GroupQueue:
    """A list kept in `SequenceGroup.order`. Serves the running, in their order of plans, and the swapped.

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


class Totals:
    """What a queue's groups add up to, kept as they come and go: the router asks for it at every request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """To be computed before all of these run their next token; single ones are decodes and do not count."""
        self.num_branches = 0
        self._counted: dict[int, tuple[int, int]] = {}
        """Arrival number -> what of the totals is this group's."""

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


class ParkedQueue(GroupQueue, Totals):
    """Groups that are swapped, with running totals."""

    def __init__(self) -> None:
        GroupQueue.__init__(self)
        Totals.__init__(self)

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        self._count(group)

    def remove(self, group: SequenceGroup) -> None:
        super().remove(group)
        self._forget(group)


class WaitingQueue(Totals):
    """Those that wait. Within a tenant by `order`; among tenants the one that has been served least goes first.

    Served tokens are counted as in Virtual Token Counter (Sheng et al., OSDI'24, arXiv:2401.00588, section 4): prompt
    tokens that were computed for a tenant and, weighted, its output tokens. A tenant that comes back starts at the
    least count of those that are there, so nobody saves up. One that was parked keeps its place by age, before all
    later ones of any tenant: its work has begun. With one tenant this is plain order.
    """

    def __init__(self, priority_aging_seconds: float) -> None:
        super().__init__()
        self.now = 0.0
        """Of the plan under construction: how long others have waited."""
        self._aging_seconds = priority_aging_seconds
        self._queues: dict[str, GroupQueue] = {}
        self._parked = GroupQueue()
        self._served: dict[str, float] = {}
        """Of tenants that wait now, or have since somebody else last did."""
        self._size = 0
        self.num_prompt_tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._parked
        for queue in self._queues.values():
            yield from queue

    @property
    def head(self) -> SequenceGroup | None:
        fresh = self._fair_head()
        parked = self._parked.head
        if parked is None or fresh is None:
            return parked or fresh
        return parked if parked.order < fresh.order else fresh

    @property
    def is_shared(self) -> bool:
        return len(self._served) > 1

    def _fair_head(self) -> SequenceGroup | None:
        """Of the tenants' first ones: by priority, where waiting lifts as far as the best of the others, then by what
        the tenant has been served."""
        heads = {tenant: queue.head for tenant, queue in self._queues.items()}
        groups = {tenant: group for tenant, group in heads.items() if group is not None}
        if len(groups) <= 1:
            return next(iter(groups.values()), None)
        best = min(group.request.priority for group in groups.values())

        def key(tenant: str) -> tuple[int, float, tuple[float, float, int]]:
            group = groups[tenant]
            lifted = group.request.priority - int((self.now - group.arrived_at) / self._aging_seconds)
            return (max(best, lifted), self._served[tenant], group.order)

        return groups[min(groups, key=key)]

    def charge(self, tenant: str, tokens: float) -> None:
        """`tokens` were computed for `tenant`."""
        if tenant in self._served:
            self._served[tenant] += tokens

    def add(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        if group.admitted_at is not None:
            self._parked.add(group)
        else:
            if tenant not in self._queues:
                self._queues[tenant] = GroupQueue()
                least = min((self._served[other] for other in self._queues if other != tenant), default=None)
                if least is None:
                    # Nobody else is there to be compared with.
                    self._served = {tenant: 0.0}
                else:
                    self._served[tenant] = max(least, self._served.get(tenant, 0.0))
            self._queues[tenant].add(group)
        self._size += 1
        self._count(group)
        self.num_prompt_tokens += group.request.num_prompt_tokens

    def remove(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        if group.admitted_at is not None:
            self._parked.remove(group)
        else:
            self._queues[tenant].remove(group)
            if not len(self._queues[tenant]):
                del self._queues[tenant]
        self._size -= 1
        self._forget(group)
        self.num_prompt_tokens -= group.request.num_prompt_tokens
