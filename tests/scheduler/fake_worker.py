"""A worker without a model, for scheduler tests: every slot of its pool holds a token id instead of KV.

It carries plans out as `StepPlan` documents and "attends" by reading the context back through the block table,
so a wrong block, a missing copy or a block reused too early gives wrong tokens. `expected_tokens` says what a
request must get whatever happens to it on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from octavo.protos.types import (
    MASKED_TOKEN,
    FinishReason,
    Request,
    StepPlan,
    StepResult,
    TokenLogprobs,
    finish_reason,
)

VOCAB_SIZE = 1000
EMPTY = -7
BEAM_VOCAB = 48
"""Tokens that are possible at all after a given context, for beams."""


def next_token(context: list[int], seed: int, branch: int) -> int:
    """The "model": a pure function of all tokens before, the seed and the branch."""
    return xxhash.xxh32_intdigest(np.asarray([*context, branch], np.int32).tobytes(), seed=seed) % VOCAB_SIZE


def expected_tokens(request: Request, branch: int, max_tokens: int) -> list[int]:
    context = request.prompt_token_ids.tolist()
    output: list[int] = []
    while True:
        token = next_token(context, request.seed, branch)
        context.append(token)
        output.append(token)
        if finish_reason(request, len(output), token, max_tokens):
            return output


def beam_logprobs(context: list[int]) -> list[tuple[float, int]]:
    """(log-probability, token) of all tokens that may follow, likeliest first, no two alike: a function of the
    context alone."""
    code = xxhash.xxh32_intdigest(np.asarray(context, np.int32).tobytes())
    found = [
        (-((code * (2 * i + 1)) % 9973) / 2000 - i * 1e-7, (code + i * 37) % VOCAB_SIZE)
        for i in range(BEAM_VOCAB)
    ]
    return sorted(found, reverse=True)


def expected_beams(
    request: Request,
    max_tokens: int,
    logprobs_of: Callable[[list[int]], list[tuple[float, int]]] = beam_logprobs,
) -> list[tuple[list[int], float, FinishReason]]:
    """The `n` best (tokens, score, reason) of a plain beam search, over whole lists and with no sharing."""
    params = request.params
    width = params.beam_width
    stops = request.stop_ids
    keep = max(2, 1 + len(stops)) * width
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[list[int], float, FinishReason]] = []
    for length in range(1, max_tokens + 1):
        steps = []
        for rank, (total, output) in enumerate(running):
            for logprob, token in logprobs_of([*request.prompt_token_ids.tolist(), *output]):
                if not (token in stops and length <= params.min_tokens):
                    steps.append((-(total + logprob), rank, token, [*output, token]))
        steps = sorted(steps)[:keep]
        for cost, _, token, output in steps[:width]:
            if token in stops or length == max_tokens:
                reason = FinishReason.STOP if token in stops else FinishReason.LENGTH
                finished.append((output, -cost / length**params.length_penalty, reason))
        finished = sorted(finished, key=lambda entry: -entry[1])[:width]
        running = [(-cost, output) for cost, _, token, output in steps if token not in stops][:width]
        if length == max_tokens:
            break
        if len(finished) == width:
            if params.early_stopping is True:
                break
            reach = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            if running[0][0] / reach**params.length_penalty <= finished[-1][1]:
                break
    return finished[: params.n]


@dataclass
class Row:
    request: Request
    branch: int
    max_tokens: int
    tokens: list[int]
    num_computed: int
    table: list[int]
    ended: bool = False


class FakeWorker:
    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int) -> None:
        self.block_size = block_size
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.slots = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.host = np.full((4096, block_size), EMPTY, np.int64)
        self.rows: dict[int, Row] = {}
        self.last_step = 0

    def execute(
        self, plan: StepPlan, *, fail: frozenset[int] = frozenset(), seconds: float = 0.01
    ) -> StepResult:
        """`fail`: indices of samples that come back as row errors."""
        assert plan.step_id == self.last_step + 1
        self.last_step = plan.step_id
        assert plan.num_scheduled_tokens <= self.budget
        for row in plan.released_rows.tolist():
            del self.rows[row]
        assert not set(plan.swaps_out[:, 1].tolist()) & set(plan.swaps_in[:, 0].tolist())
        self.host[plan.swaps_out[:, 1]] = self.slots[plan.swaps_out[:, 0]]
        self.slots[plan.swaps_in[:, 1]] = self.host[plan.swaps_in[:, 0]]
        for new in plan.new_sequences:
            assert new.row not in self.rows
            assert 0 <= new.row < self.max_num_seqs
            tokens = new.token_ids.tolist()
            self.rows[new.row] = Row(
                new.request, new.branch, new.max_tokens, tokens, new.num_computed_tokens, []
            )
        assert len(set(plan.beam_moves[:, 1].tolist())) == len(plan.beam_moves)
        parents = {parent: self.rows[parent] for parent in plan.beam_moves[:, 0].tolist()}
        children = {}
        for parent, row, branch, token in plan.beam_moves.tolist():
            source = parents[parent]
            assert row == parent or row not in self.rows
            assert source.num_computed == len(source.tokens), "a beam goes on before it has candidates"
            children[row] = Row(
                source.request,
                branch,
                source.max_tokens,
                [*source.tokens, token],
                source.num_computed,
                list(source.table),
            )
        self.rows.update(children)
        for row, index, block in plan.block_updates.tolist():
            table = self.rows[row].table
            assert index <= len(table)
            table[index : index + 1] = [block]
        starts = {}
        for parent, child, branch in plan.forks.tolist():
            source = self.rows[parent]
            assert child not in self.rows
            self.rows[child] = Row(
                source.request,
                branch,
                source.max_tokens,
                list(source.tokens),
                source.num_computed,
                list(source.table),
            )
            starts[child] = parent
        copies = plan.block_copies
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist())
        self.slots[copies[:, 1]] = self.slots[copies[:, 0]]
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        # All writes come before all reads, as in each layer of a model: who starts in this plan may begin behind a
        # block that it fills.
        behind = {new.row: new.num_computed_tokens // self.block_size for new in plan.new_sequences}
        behind |= {child: behind[parent] for child, parent in starts.items() if parent in behind}
        for row, count, start in zip(
            plan.rows.tolist(), plan.num_tokens.tolist(), plan.start_positions.tolist(), strict=True
        ):
            state = self.rows[row]
            if state.ended:
                continue
            assert state.num_computed == start, "the plan and the worker differ on what is computed"
            assert start + count <= len(state.tokens), "a plan beyond the known tokens"
            for position in range(start, start + count):
                block = state.table[position // self.block_size]
                holders = sum(
                    block in other.table
                    for key, other in self.rows.items()
                    if starts.get(key) != row and block not in other.table[: behind.get(key, 0)]
                )
                assert holders == 1, f"block {block} is written while {holders} hold it"
                self.slots[block, position % self.block_size] = state.tokens[position]
            state.num_computed += count
        for row in behind:
            known = self.read(self.rows[row])[: behind[row] * self.block_size]
            assert known == self.rows[row].tokens[: len(known)], (
                "a sequence began behind what nobody computed"
            )
        for child, parent in starts.items():
            self.rows[child].num_computed = self.rows[parent].num_computed
        sampled = []
        errors = []
        logprobs: list[TokenLogprobs | None] = []
        for number, (row, index) in enumerate(
            zip(plan.sample_rows.tolist(), plan.sample_indices.tolist(), strict=True)
        ):
            source, state = self.rows[int(plan.rows[index])], self.rows[row]
            logprobs.append(None)
            if state.ended:
                sampled.append(MASKED_TOKEN)
                continue
            if number in fail:
                state.ended = True
                errors.append((number, "made to fail"))
                sampled.append(MASKED_TOKEN)
                continue
            context = self.read(source)
            assert context == source.tokens[: source.num_computed], "the KV read back is not what was written"
            if count := state.request.num_beam_candidates:
                tops = beam_logprobs(context)[:count]
                logprobs[-1] = TokenLogprobs(tops[0][0], tuple(t for _, t in tops), tuple(p for p, _ in tops))
                sampled.append(tops[0][1])
                continue
            token = next_token(context, state.request.seed, state.branch)
            state.tokens.append(token)
            output = len(state.tokens) - state.request.num_prompt_tokens
            state.ended = finish_reason(state.request, output, token, state.max_tokens) is not None
            sampled.append(token)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=np.asarray(sampled, np.int32),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            row_errors=tuple(errors),
            step_seconds=seconds,
        )

    def read(self, row: Row) -> list[int]:
        flat = self.slots[row.table].reshape(-1)
        return flat[: row.num_computed].tolist()
