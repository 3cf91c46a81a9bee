"""What the caller of an unfinished request has got: all that is needed to go on with it anywhere else.

Owns one rule: over all deltas of a branch, offsets rise without gap or overlap. Kept twice, by whoever may outlive
the other: the coordinator keeps it for when a worker is lost, the ingress for when the coordinator is. What a lost
scheduler had sampled and nobody had handed on is sampled again, and is the same. Knows nothing of workers or streams.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np

from octavo.protos.errors import IntegrityError, OctavoError
from octavo.protos.types import (
    BranchSoFar,
    FinishReason,
    OutputDelta,
    Request,
    Resume,
)


class Delivered:
    """Of one request. `now` is seconds of any one clock."""

    __slots__ = ("_began", "_ended", "_metrics", "_outputs", "request")

    def __init__(self, request: Request, now: float, resume: Resume | None = None) -> None:
        self.request = request
        resume = resume or Resume()
        self._metrics = resume.metrics
        self._began = now - resume.metrics.total_seconds
        self._outputs = [array("i") for _ in range(request.params.num_branches)]
        self._ended: dict[int, FinishReason] = {}
        for number, branch in enumerate(resume.branches[: len(self._outputs)]):
            self._outputs[number].frombytes(branch.token_ids.tobytes())
            if branch.finish_reason is not None:
                self._ended[number] = branch.finish_reason

    @property
    def num_outputs(self) -> int:
        """Tokens, of all branches together."""
        return sum(map(len, self._outputs))

    @property
    def deadline(self) -> float | None:
        """When nobody waits for it any more; None: never. Counted from its first arrival."""
        timeout = self.request.timeout_seconds
        return None if timeout is None else self._began + timeout

    def has_ended(self, branch: int) -> bool:
        return branch in self._ended

    def take(self, delta: OutputDelta) -> None:
        """Note what is handed on now. Raises `IntegrityError` for what does not follow what was."""
        if delta.error is not None:
            return
        if not 0 <= delta.branch < len(self._outputs):
            raise IntegrityError(f"branch {delta.branch} of {len(self._outputs)}")
        outputs = self._outputs[delta.branch]
        if delta.offset != len(outputs) or delta.branch in self._ended:
            raise IntegrityError(
                f"branch {delta.branch} has {len(outputs)} tokens and goes on at {delta.offset}"
            )
        outputs.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended[delta.branch] = delta.finish_reason
        if delta.metrics is not None:
            self._metrics = delta.metrics

    def resume(self, now: float) -> Resume:
        """Where to go on from."""
        metrics = replace(self._metrics, total_seconds=now - self._began)
        if self.request.params.beam_width is not None or not any(self._outputs):
            return Resume(metrics=metrics)
        branches = tuple(
            BranchSoFar(
                token_ids=np.frombuffer(outputs.tobytes(), np.int32), finish_reason=self._ended.get(number)
            )
            for number, outputs in enumerate(self._outputs)
        )
        return Resume(branches=branches, metrics=metrics)

    def end(
        self, reason: FinishReason, now: float, *, branch: int | None = None, error: OctavoError | None = None
    ) -> list[OutputDelta]:
        """Deltas that end one branch, or all, without further tokens. They have not been `take`n."""
        live = [number for number in range(len(self._outputs)) if number not in self._ended]
        ending = live if branch is None else [number for number in live if number == branch]
        finished = ending == live
        return [
            OutputDelta(
                request_id=self.request.request_id,
                branch=number,
                offset=len(self._outputs[number]),
                token_ids=(),
                finish_reason=reason,
                request_finished=finished and number == ending[-1],
                error=None if error is None else error.message,
                error_name=None if error is None else type(error).__name__,
                metrics=replace(self._metrics, total_seconds=now - self._began)
                if finished and number == ending[-1]
                else None,
            )
            for number in ending
        ]
