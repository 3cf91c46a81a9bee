"""What each waiting request will find cached, kept exact from its reservation to its admission.

The router tells a request how much of its prompt is cached where it is sent. Until its turn comes, others compute more
of that prefix, or what was there is evicted or moves to the host. Each such change of the tree is heard here: the
number is looked up again for those it concerns, and why it changed is kept for the timeline. So a prediction is
never wrong; it is kept, or it was changed by something that has a name.

Pinning what was found instead would hold blocks for requests that do not run, at the cost of those that do.

Owns no block and decides nothing. A reservation stands at the end of its known prefix, under the first token that goes
on from there: a change of the tree concerns nobody else, so that it costs a look into a dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.protos.errors import IntegrityError
from octavo.scheduler.events import Event, Repredicted, RepredictionCause
from octavo.scheduler.kv_manager import KVManager, PrefixHit
from octavo.scheduler.prefix_tree import TOKEN_BYTES, RootKey, TreeNode
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.sequence import SequenceGroup

_End = int | RootKey
"""The last known block of a prefix; the root's key where there is none."""


@dataclass(slots=True, eq=False)
class _Reservation:
    group: SequenceGroup
    predicted_tokens: int
    """As told when it was made."""
    promised_tokens: int
    """What requests ahead of it are to compute of its prompt: a forecast, not part of the prediction."""
    cached_tokens: int = 0
    """In the tree now."""
    end: _End = 0
    next_token: bytes = b""
    meets_host: bool = False
    """Some of its prefix is in host memory, so that whatever moves there or back may concern it."""
    causes: dict[RepredictionCause, None] = field(default_factory=dict)
    """Of the changes so far, in order."""
    pending: dict[RepredictionCause, None] = field(default_factory=dict)
    """Of what happened since it was last looked up."""

    @property
    def forked(self) -> bool:
        """It may start in the blocks of a running request, which grow with every step."""
        return bool(self.group.request.fork_of)


class Reservations:
    """Of the requests of one worker that wait for their first admission. A listener of its prefix tree."""

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self._kv = kv
        self._waiting = waiting
        self._held: dict[str, _Reservation] = {}
        self._at: dict[_End, dict[bytes, dict[_Reservation, None]]] = {}
        self._stale: dict[_Reservation, None] = {}
        self._meets_host: dict[_Reservation, None] = {}
        self._tiers_changed = False
        self._loads_from_host = False
        kv.tree.listeners.append(self)

    # --- a request's life ----------------------------------------------------------------------------------

    def hold(self, group: SequenceGroup, hit: PrefixHit, *, predicted: int, promised: int) -> None:
        """`group` waits from now on, with `hit` in the tree; `predicted` tokens were told, those of a running parent
        included."""
        reservation = _Reservation(group, predicted, promised)
        self._held[group.request.request_id] = reservation
        self._place(reservation, hit)

    def forget(self, group: SequenceGroup) -> None:
        """It ended while it waited. Those that hold nothing are ignored."""
        reservation = self._held.pop(group.request.request_id, None)
        if reservation is not None:
            self._lift(reservation)

    def settle(self, group: SequenceGroup, hit: PrefixHit, now: float, *, no_room: bool) -> list[Event]:
        """`group` is admitted with `hit`; `no_room`: less was taken than was found, since the pool is full.

        Returns a `Repredicted` unless that is what was told when the reservation was made.
        """
        reservation = self._held.pop(group.request.request_id, None)
        if reservation is None:
            return []
        self._lift(reservation)
        causes = reservation.causes
        if hit.num_tokens != reservation.cached_tokens:
            causes |= reservation.pending
            if reservation.meets_host and self._tiers_changed:
                causes[RepredictionCause.MOVED] = None
            if reservation.forked:
                causes[RepredictionCause.PARENT] = None
            if no_room:
                causes[RepredictionCause.NO_ROOM] = None
        if hit.num_tokens == reservation.predicted_tokens:
            return []
        return [
            Repredicted(
                group.request.request_id,
                now,
                reservation.predicted_tokens,
                reservation.promised_tokens,
                hit.num_tokens,
                tuple(causes),
            )
        ]

    def refresh(self) -> None:
        """Look up again what has changed. Between plans: what a plan under construction moves cannot be read in it."""
        if self._meets_host:
            loads = self._kv.loads_from_host
            if self._tiers_changed or loads != self._loads_from_host:
                for reservation in self._meets_host:
                    self._mark(reservation, RepredictionCause.MOVED)
            self._loads_from_host = loads
        self._tiers_changed = False
        if not self._stale:
            return
        stale, self._stale = self._stale, {}
        for reservation in stale:
            group, before = reservation.group, reservation.cached_tokens
            self._lift(reservation)
            self._place(reservation, self._find(reservation))
            if reservation.cached_tokens != before:
                reservation.causes |= reservation.pending
                parent_tokens = reservation.predicted_tokens if reservation.forked else 0
                group.found_tokens = max(
                    reservation.cached_tokens, reservation.promised_tokens, parent_tokens
                )
                self._waiting.recount(group)
            reservation.pending = {}

    def predicted_tokens(self, request_id: str) -> int:
        """Tokens that an admission in the next plan would find in the tree. After `refresh`."""
        return self._held[request_id].cached_tokens

    def _find(self, reservation: _Reservation) -> PrefixHit:
        request = reservation.group.request
        return self._kv.find_prefix(reservation.group, request.prompt_token_ids.tobytes())

    def _place(self, reservation: _Reservation, hit: PrefixHit) -> None:
        request = reservation.group.request
        reservation.cached_tokens = hit.num_tokens
        if hit.host_blocks:
            reservation.end = self._kv.pool.num_blocks + hit.host_blocks[-1]
        else:
            reservation.end = hit.blocks[-1] if hit.blocks else reservation.group.root_key
        whole = (len(hit.blocks) + len(hit.host_blocks)) * self._kv.block_size
        reservation.next_token = request.prompt_token_ids[whole : whole + 1].tobytes()
        reservation.meets_host = hit.meets_host
        if hit.meets_host:
            if not self._meets_host:
                self._loads_from_host = self._kv.loads_from_host
            self._meets_host[reservation] = None
        here = self._at.setdefault(reservation.end, {})
        here.setdefault(reservation.next_token, {})[reservation] = None

    def _lift(self, reservation: _Reservation) -> None:
        here = self._at[reservation.end]
        del here[reservation.next_token][reservation]
        if not here[reservation.next_token]:
            del here[reservation.next_token]
            if not here:
                del self._at[reservation.end]
        self._stale.pop(reservation, None)
        self._meets_host.pop(reservation, None)

    def _mark(self, reservation: _Reservation, cause: RepredictionCause) -> None:
        reservation.pending[cause] = None
        self._stale[reservation] = None

    # --- what the tree says --------------------------------------------------------------------------------

    def entered(self, node: TreeNode, tokens: bytes, num_blocks: int) -> None:
        """See `Listener`. Concerns whoever ended there and goes on with the same token."""
        if self._at:
            self._changed_behind(
                _end_of(node, len(node.blocks)), tokens[:TOKEN_BYTES], RepredictionCause.COMPUTED
            )

    def left(self, node: TreeNode, num_blocks: int) -> None:
        """See `Listener`. Concerns whoever ended in what goes, or shared the beginning of its first block."""
        if not self._at:
            return
        for block in node.blocks[-num_blocks:]:
            for reservations in self._at.get(block, {}).values():
                for reservation in reservations:
                    self._mark(reservation, RepredictionCause.EVICTED)
        place = len(node.blocks) - num_blocks
        at = place * self._kv.block_size * TOKEN_BYTES
        self._changed_behind(
            _end_of(node, place), bytes(node.tokens[at : at + TOKEN_BYTES]), RepredictionCause.EVICTED
        )

    def moved(self, node: TreeNode, place: int, old: int) -> None:
        """See `Listener`. Concerns whoever ended in that block or shared the beginning of it, and all whose prefix
        reaches the host."""
        self._tiers_changed = True
        if not self._at:
            return
        for reservations in self._at.get(old, {}).values():
            for reservation in reservations:
                self._mark(reservation, RepredictionCause.MOVED)
        at = place * self._kv.block_size * TOKEN_BYTES
        self._changed_behind(
            _end_of(node, place), bytes(node.tokens[at : at + TOKEN_BYTES]), RepredictionCause.MOVED
        )

    def _changed_behind(self, end: _End, token: bytes, cause: RepredictionCause) -> None:
        for reservation in self._at.get(end, {}).get(token, ()):
            self._mark(reservation, cause)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where a prediction is not what the tree holds, after a `refresh`."""
        for request_id, reservation in self._held.items():
            found = self._find(reservation).num_tokens
            if found != reservation.cached_tokens:
                raise IntegrityError(
                    f"{request_id} is predicted to find {reservation.cached_tokens} tokens and would find {found}"
                )
        placed = sum(len(found) for here in self._at.values() for found in here.values())
        if placed != len(self._held):
            raise IntegrityError(f"{placed} places for {len(self._held)} reservations")


def _end_of(node: TreeNode, place: int) -> _End:
    """The block before `place` of a run."""
    if place:
        return node.blocks[place - 1]
    parent = node.parent
    return parent.blocks[-1] if parent is not None and parent.blocks else node.root_key
