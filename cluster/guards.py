"""What experience says against how a system runs, as far as its coordinator sees.

Owns what is watched and when it is worth a word. Whoever asks for the system's health gets the advice (`/health`,
`octavo status`, the log), that on the setup (`advice.py`) with it, and it is logged when it first holds. Pure: time
and schedulers are handed in.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

from octavo.cluster.advice import Advice
from octavo.protos.types import Request
from octavo.scheduler.events import Event, Preempted
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 64
"""Prompts that begin with the same so many tokens would have shared KV."""
PREFIXES_MAX = 4096
"""Beginnings that are remembered, the least recent forgotten first."""
REPEATS_MIN = 16
"""So many repeated beginnings are no accident."""
PREEMPTION_WINDOW_SECONDS = 60.0
PREEMPTIONS_MAX = 100_000
"""In one window; more are not counted apart."""


class Guards:
    """Watches one running system."""

    def __init__(self, setup: Sequence[Advice] = (), *, prefix_cache: bool = True) -> None:
        """`setup`: what was found before the start, which holds for as long as the system runs."""
        self._setup = tuple(setup)
        self._prefix_cache = prefix_cache
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()
        self._num_prompts = 0
        self._num_repeats = 0
        self._preempted_at: deque[float] = deque(maxlen=PREEMPTIONS_MAX)
        self._told: set[str] = set()

    def on_request(self, request: Request) -> None:
        """A request was accepted."""
        if (
            self._prefix_cache
            or not request.use_prefix_cache
            or len(request.prompt_token_ids) < PREFIX_TOKENS
        ):
            return
        self._num_prompts += 1
        start = request.cache_salt.encode() + b"\0" + request.prompt_token_ids[:PREFIX_TOKENS].tobytes()
        if start in self._prefixes:
            self._num_repeats += 1
            self._prefixes.move_to_end(start)
            return
        self._prefixes[start] = None
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)

    def on_events(self, events: Iterable[Event], now: float) -> None:
        """Something happened on a worker."""
        self._preempted_at.extend(now for event in events if isinstance(event, Preempted))

    def num_preempted(self, now: float) -> int:
        """Preemptions in the last minute."""
        while self._preempted_at and self._preempted_at[0] <= now - PREEMPTION_WINDOW_SECONDS:
            self._preempted_at.popleft()
        return len(self._preempted_at)

    def look(self, schedulers: Mapping[str, Scheduler], now: float) -> tuple[Advice, ...]:
        """What holds now; what did not at the last look is logged."""
        found = [*self._setup, *self._prefixes_repeat(), *self._budget(schedulers), *self._preemptions(now)]
        for warning in found:
            if warning.code not in self._told:
                logger.warning("%s", warning)
        self._told = {warning.code for warning in found}
        return tuple(found)

    def _prefixes_repeat(self) -> Iterable[Advice]:
        if self._num_repeats >= REPEATS_MIN:
            yield Advice(
                "prefix_cache",
                f"prefix_cache is off, and {self._num_repeats} of {self._num_prompts} prompts began with the same "
                f"{PREFIX_TOKENS} tokens as an earlier one, which were computed again",
                "set prefix_cache to true",
            )

    def _budget(self, schedulers: Mapping[str, Scheduler]) -> Iterable[Advice]:
        for worker_id, scheduler in schedulers.items():
            target, budget = scheduler.config.itl_target, scheduler.config.max_num_batched_tokens
            fits = None
            if target is not None:
                fits = scheduler.step_time.tokens_within(target, num_rows=1, context_tokens=0)
            if target is None or fits is None or fits >= budget:
                continue
            seconds = scheduler.step_time.step_seconds(num_tokens=budget, num_rows=1, context_tokens=0)
            yield Advice(
                "itl_target",
                f"a step of max_num_batched_tokens ({budget}) takes {worker_id} {seconds:.3g} s, and itl_target is "
                f"{target:g} s",
                f"set max_num_batched_tokens to at most {fits}, or itl_target to at least {seconds:.2g}"
                if fits
                else f"set itl_target to at least {seconds:.2g}: not one token fits now",
            )
            return  # the others are of the same kind

    def _preemptions(self, now: float) -> Iterable[Advice]:
        count = self.num_preempted(now)
        if count:
            yield Advice(
                "preemptions",
                f"requests were preempted {count} times in the last minute, because KV blocks ran out",
                "lower max_num_seqs, give the cache more memory (num_blocks, gpu_memory_utilization), or add workers "
                "(octavo scale)",
            )
