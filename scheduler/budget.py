"""The one token budget of a step: a number, or what fits into the inter-token latency that was asked for."""

from __future__ import annotations

from octavo.scheduler.step_time import StepTimeModel


class TokenBudget:
    """Tokens that the step under construction may still take (Sarathi-Serve, arXiv:2403.02310, section 4)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def take(self, num_tokens: int) -> None:
        assert num_tokens <= self.left, f"{num_tokens} tokens over a budget with {self.left} left"
        self.left -= num_tokens


def step_budget(
    max_num_batched_tokens: int,
    itl_target: float | None,
    step_time: StepTimeModel,
    *,
    num_decodes: int,
    context_tokens: int,
    min_chunk: int,
) -> TokenBudget:
    """The budget of the next step, never above `max_num_batched_tokens`.

    Running decodes always fit, and `min_chunk` tokens of prefill beside them, however tight `itl_target`
    (seconds) is: a target that cannot be met must not starve those who wait.
    """
    limit = max_num_batched_tokens
    if itl_target is not None:
        within = step_time.tokens_within(itl_target, num_rows=num_decodes, context_tokens=context_tokens)
        if within is not None:
            limit = min(limit, max(within, num_decodes + min_chunk))
    return TokenBudget(limit)
