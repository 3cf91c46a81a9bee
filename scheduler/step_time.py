"""How long a step takes: one linear model with three users (token budget, router, simulator).

    seconds = c0 + c1 * tokens + c2 * rows + c3 * context tokens read

Refitted after every step by recursive least squares with exponential forgetting (Ljung, System Identification,
2nd ed., section 11.2). Starts from the worker's calibration. Negative coefficients count as 0 in a prediction: a
step never gets cheaper by doing more. The fit itself is left alone, since cutting it would bias the others.
"""

from __future__ import annotations

import numpy as np

from octavo.protos.types import WorkerInfo

_SCALE = np.array([1.0, 1 / 512, 1 / 64, 1 / 65536])
"""Features near 1, so that one forgetting factor and one prior suit all of them."""
_FORGET = 0.998
_PRIOR_VARIANCE = 10.0
"""In units of one step's noise: the calibration counts for a fraction of a step, so a few steps outweigh it."""
_MAX_VARIANCE = 1e3


class StepTimeModel:
    """Predicts seconds of a step. Before calibration and before any step it knows nothing and predicts 0."""

    def __init__(self, *, prefill_tokens_per_second: float = 0.0, decode_step_seconds: float = 0.0) -> None:
        per_token = 1 / prefill_tokens_per_second if prefill_tokens_per_second > 0 else 0.0
        fixed = max(0.0, decode_step_seconds - per_token)
        self._fit = np.array([fixed, per_token, 0.0, 0.0]) / _SCALE
        self.coefficients = self._coefficients()
        self._covariance = np.eye(4) * _PRIOR_VARIANCE
        self.num_observed = 0

    @classmethod
    def of_coefficients(
        cls, fixed: float, per_token: float, per_row: float, per_context_token: float
    ) -> StepTimeModel:
        """A model that is known: of a calibration file, or computed from a data sheet."""
        model = cls()
        model._fit = np.array([fixed, per_token, per_row, per_context_token]) / _SCALE
        model.coefficients = model._coefficients()
        return model

    @classmethod
    def of_worker(cls, info: WorkerInfo) -> StepTimeModel:
        """What a worker's own calibration tells, until its first steps tell more."""
        return cls(
            prefill_tokens_per_second=info.prefill_tokens_per_second,
            decode_step_seconds=info.decode_step_seconds,
        )

    def observe(self, *, num_tokens: int, num_rows: int, context_tokens: int, seconds: float) -> None:
        """Learn from one step that was measured."""
        x = np.array([1.0, num_tokens, num_rows, context_tokens]) * _SCALE
        gain = self._covariance @ x
        gain /= _FORGET + x @ gain
        self._fit = self._fit + gain * (seconds - x @ self._fit)
        self.coefficients = self._coefficients()
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / _FORGET
        # Directions that no step excites would grow without end under forgetting (estimator wind-up).
        self._covariance = covariance * min(1.0, _MAX_VARIANCE / max(float(np.trace(covariance)), 1e-12))
        self.num_observed += 1

    def _coefficients(self) -> tuple[float, float, float, float]:
        """Seconds a step, a token, a row and a token of context; none is negative."""
        fixed, per_token, per_row, per_context = np.maximum(0.0, self._fit * _SCALE).tolist()
        return fixed, per_token, per_row, per_context

    def step_seconds(self, *, num_tokens: int, num_rows: int, context_tokens: int) -> float:
        fixed, per_token, per_row, per_context = self.coefficients
        return fixed + per_token * num_tokens + per_row * num_rows + per_context * context_tokens

    def prefill_seconds(self, num_tokens: int, *, chunk_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute `num_tokens` on top of `context_tokens`, in chunks of at most `chunk_tokens`."""
        if num_tokens <= 0:
            return 0.0
        steps = -(-num_tokens // chunk_tokens)
        read = steps * context_tokens + num_tokens * (steps + 1) // 2
        fixed, per_token, per_row, per_context = self.coefficients
        return steps * (fixed + per_row) + num_tokens * per_token + read * per_context

    def tokens_within(self, seconds: float, *, num_rows: int, context_tokens: int) -> int | None:
        """Most tokens that a step of these rows can run within `seconds`; None while nothing is known."""
        fixed, per_token, per_row, per_context = self.coefficients
        if per_token <= 0:
            return None
        return max(0, int((seconds - fixed - per_row * num_rows - per_context * context_tokens) / per_token))
