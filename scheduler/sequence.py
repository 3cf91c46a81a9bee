"""One request's live state: SequenceGroup (admitted and preempted as a unit) and its branches (Sequence).

Prompt/output and computed/uncomputed are separate axes: preemption resets `num_computed_tokens` and never moves
a token. Knows nothing of pools or plans.
"""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import dataclass

from octavo.protos.types import FinishReason, Request, RequestMetrics, Resume, TokenLogprobs
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.prefix_tree import RootKey


class GroupState(enum.Enum):
    WAITING = "waiting"
    """Holds no block and no row; new, or parked and to be recomputed."""
    RUNNING = "running"
    SWAPPED = "swapped"
    """Holds host blocks, no device block and no row."""
    FINISHED = "finished"


_TRANSITIONS = {
    (GroupState.WAITING, GroupState.RUNNING),
    (GroupState.RUNNING, GroupState.WAITING),
    (GroupState.RUNNING, GroupState.FINISHED),
    (GroupState.RUNNING, GroupState.SWAPPED),
    (GroupState.SWAPPED, GroupState.RUNNING),
    (GroupState.SWAPPED, GroupState.FINISHED),
    (GroupState.WAITING, GroupState.FINISHED),
}


@dataclass(frozen=True, slots=True)
class ParkedBlocks:
    """Where a swapped branch's KV is: the end of its table in host blocks, the beginning shared on the device."""

    num_kept_blocks: int
    """Leading blocks that others held too and that were not moved."""
    host_blocks: list[int]
    num_computed_tokens: int


class Sequence:
    """One branch. Plain slots and no properties in the hot path: 256 of these move at every step."""

    __slots__ = (
        "block_table",
        "branch",
        "candidates",
        "finish_reason",
        "group",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pending",
        "num_planned_outputs",
        "num_published_blocks",
        "num_total_tokens",
        "parent_row",
        "parked",
        "row",
        "tail_shared",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, branch: int) -> None:
        self.group = group
        self.branch = branch
        self.row: int | None = None
        """Slot on the worker while running."""
        self.token_ids = array("i", group.request.prompt_token_ids.tobytes())
        """Prompt, then the outputs whose values are known."""
        self.num_total_tokens = len(self.token_ids)
        """Known tokens plus those that plans under way will sample."""
        self.num_computed_tokens = 0
        """Tokens whose KV plans up to now, under way included, have computed."""
        self.num_lost_tokens = 0
        """Computed once and given up by preemption; until the return shows how many of them are found again."""
        self.num_pending = 0
        """Samples under way."""
        self.num_planned_outputs = 0
        """Output tokens, pending ones included."""
        self.block_table: list[int] = []
        self.num_published_blocks = 0
        """Leading blocks that stand in the PrefixTree."""
        self.parked: ParkedBlocks | None = None
        self.tail_shared = False
        """A branch point: look before writing into the last block."""
        self.finish_reason: FinishReason | None = None
        self.candidates: TokenLogprobs | None = None
        """Of a beam: its likeliest next tokens, until the other beams have theirs and the search can go on."""
        self.parent_row: int | None = None
        """Of a beam that got its last token by a step of the search: the row that it goes on from, to be told to the
        worker with the next plan."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose values are known."""
        return len(self.token_ids) - self.group.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_total_tokens - self.num_computed_tokens


class SequenceGroup:
    """The unit of admission, preemption and completion: one request with all its branches."""

    __slots__ = (
        "admitted_at",
        "arrival_number",
        "arrived_at",
        "beams",
        "cached_tokens",
        "first_token_at",
        "forked",
        "found_tokens",
        "line",
        "live",
        "max_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "parked_at_step",
        "protected_until_step",
        "recomputed_tokens",
        "request",
        "root_key",
        "state",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival_number: int,
        arrived_at: float,
        max_tokens: int,
        priority_aging_seconds: float = math.inf,
    ) -> None:
        self.request = request
        self.max_tokens = max_tokens
        self.arrival_number = arrival_number
        self.arrived_at = arrived_at
        priority = request.priority
        self.line = (
            (float(priority), 0.0)
            if math.isinf(priority_aging_seconds)
            else (0.0, arrived_at + priority * priority_aging_seconds)
        )
        self.state = GroupState.WAITING
        self.live: list[Sequence] = [Sequence(self, 0)]
        """Branches that have not ended, by branch number."""
        self.beams = BeamSearch(request, max_tokens) if request.params.beam_width else None
        """The branches are the beams of a search: forked and dropped step by step."""
        self.forked = request.params.num_branches == 1 or self.beams is not None
        """No branches are to be made at the end of the prompt."""
        self.root_key: RootKey = (request.cache_salt, request.adapter)
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.cached_tokens = 0
        self.found_tokens = 0
        """Of its prompt, cached when it came or by its turn: what those who wait behind it need not reckon with."""
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        """Told so far, of the `num_prompt_tokens` - 1 that there are for a request that asks."""
        self.parked_at_step = 0
        """The step that it gave way in; it comes back in a later one."""
        self.recomputed_tokens = 0
        self.protected_until_step = 0
        """No victim before this step: a return has bought it."""

    @property
    def order(self) -> tuple[float, float, int]:
        """Place in line. First come, first served within a priority, and a step of priority is a head start of
        `priority_aging_seconds`: whoever waits ages past later ones of higher priority. Arrival numbers are unique, so
        this never ties."""
        return (*self.line, self.arrival_number)

    def ready_beams(self) -> list[Sequence]:
        """Beams with a token to run: neither under way nor waiting for the others."""
        return [seq for seq in self.live if not seq.num_pending and seq.candidates is None]

    @property
    def num_branches(self) -> int:
        """Rows that this group needs while it runs."""
        if self.forked and self.beams is None:
            return len(self.live)
        return self.request.params.num_branches

    def move_to(self, state: GroupState) -> None:
        assert (self.state, state) in _TRANSITIONS, f"{self.state} -> {state}"
        self.state = state

    def go_on_from(self, resume: Resume) -> None:
        """A new group takes the place of one that was lost elsewhere: its outputs are outputs here too, so that
        positions, penalties and limits count on. The caller has checked it (`check_resume`)."""
        so_far = resume.metrics
        if not resume.branches:
            return
        self.admitted_at = self.arrived_at + so_far.queue_seconds
        self.first_token_at = self.arrived_at + so_far.ttft_seconds
        self.cached_tokens = so_far.cached_tokens
        self.num_preemptions = so_far.num_preemptions
        self.recomputed_tokens = so_far.recomputed_tokens
        self.forked = True
        # They came before the first token.
        self.num_prompt_logprobs = self.request.num_prompt_tokens - 1
        self.live = []
        for number, branch in enumerate(resume.branches):
            if branch.finish_reason is None:
                seq = Sequence(self, number)
                # All but the last output had KV where it comes from.
                seq.num_lost_tokens = len(seq.token_ids) + len(branch.token_ids) - 1
                seq.token_ids.frombytes(branch.token_ids.tobytes())
                seq.num_total_tokens = len(seq.token_ids)
                seq.num_planned_outputs = len(branch.token_ids)
                self.live.append(seq)

    def metrics(self, now: float) -> RequestMetrics:
        return RequestMetrics(
            cached_tokens=self.cached_tokens,
            num_preemptions=self.num_preemptions,
            queue_seconds=(self.admitted_at if self.admitted_at is not None else now) - self.arrived_at,
            ttft_seconds=(self.first_token_at if self.first_token_at is not None else now) - self.arrived_at,
            total_seconds=now - self.arrived_at,
            recomputed_tokens=self.recomputed_tokens,
        )
