"""The contracts: what the parts of Octavo say to each other, as plain frozen dataclasses.

Owns the vocabulary of DESIGN §2 that crosses a boundary. Knows nothing of protobuf (`codec.py` does), torch,
ray or grpc. Arrays are numpy, little-endian int32 unless a field says otherwise, and are never written to
after construction. Lengths are in tokens, times in seconds, sizes in bytes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.protos.errors import IntegrityError, InvalidRequestError
from octavo.protos.structured_output import StructuredOutput

Int32Array = npt.NDArray[np.int32]

GREEDY_BELOW_TEMPERATURE = 1e-3
"""A temperature under this acts as 0: softmax at 1/T > 1000 is argmax, and 1/T must not overflow."""
MAX_N = 128
MAX_BEAM_WIDTH = 32
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_PROMPT_LOGITS = 128
"""Prompt tokens of one step whose log-probabilities may be asked for: logits of more would not fit beside the others
of a large vocabulary. Workers reserve memory for so many."""
MASKED_TOKEN = -1
"""In `StepResult.token_ids`: the row had already ended when this plan, sent ahead, reached the worker."""


class FinishReason(enum.StrEnum):
    """Why a branch ended. The first two are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # Written so that NaN, which compares false to everything, is refused too.
    if not ((low < number if open_low else low <= number) and number <= high):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}", param=name)
    return number


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= int(value) <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)
    return int(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r}", param=name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and meaning follow vLLM's and OpenAI's.

    Every field is checked on construction. Raises `InvalidRequestError` naming the field and its limits.
    Ids are checked against the vocabulary by `check_vocab`, once the model is known.
    """

    n: int = 1
    """Branches returned."""
    best_of: int | None = None
    """Branches sampled, of which the `n` of the highest mean log-probability are returned; None: n."""
    max_tokens: int | None = 16
    """None: until the model's limit."""
    min_tokens: int = 0
    """End-of-sequence and `stop_token_ids` cannot be sampled before this many output tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: the front door draws one, so that a resumed request repeats its numbers all the same."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k: the chosen token's log-probability and those of the k likeliest, of the raw distribution."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of every prompt token but the first. The prompt is then computed whole, whatever is cached."""
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    """What the output must match; the end-of-sequence token comes when it does and may not go on."""
    beam_width: int | None = None
    """Beam search over so many hypotheses, of which the best `n` are returned; None: sampling or greedy."""
    length_penalty: float = 1.0
    """A finished hypothesis scores its log-probability / (output tokens ** length_penalty)."""
    early_stopping: bool | str = False
    """When a beam search with `beam_width` finished hypotheses ends. True: at once. False: when the best running
    one, scored at its present length, cannot beat the worst of them. "never": when it could not at any length."""

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # frozen: only here

        put("n", _integer("n", self.n, 1, MAX_N))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                param="min_tokens",
            )
        put("temperature", _number("temperature", self.temperature, 0.0, 2.0))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(
            "repetition_penalty",
            # A tiny one would turn the logits that are divided by it into infinities.
            _number("repetition_penalty", self.repetition_penalty, 0.01, 10.0),
        )
        put("logit_bias", self._checked_bias(self.logit_bias))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        put("stop", self._checked_stop(self.stop))
        put("stop_token_ids", self._checked_stop_ids(self.stop_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        put("length_penalty", _number("length_penalty", self.length_penalty, -10.0, 10.0))
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}',
                param="early_stopping",
            )
        if self.best_of is not None:
            put("best_of", _integer("best_of", self.best_of, self.n, MAX_N))
        if self.structured_output is not None:
            self._check_structured_output()
        if self.beam_width is not None:
            self._check_beams()
        elif self.length_penalty != 1.0 or self.early_stopping is not False:
            name = "length_penalty" if self.length_penalty != 1.0 else "early_stopping"
            raise InvalidRequestError(f"{name} means something only with beam_width", param=name)

    def _check_structured_output(self) -> None:
        """An output that is complete can only end, so nothing may forbid its end."""
        if not isinstance(self.structured_output, StructuredOutput):
            raise InvalidRequestError(
                f"structured_output must be a StructuredOutput, got {self.structured_output!r:.80}",
                param="structured_output",
            )
        for name, neutral in (("ignore_eos", False), ("min_tokens", 0)):
            if getattr(self, name) != neutral:
                raise InvalidRequestError(
                    f"{name} cannot be combined with structured output, which ends when it is complete",
                    param=name,
                )

    def _check_beams(self) -> None:
        """Beam search ranks by the model's own log-probabilities: nothing may bend them, no text can end one."""
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH))
        assert self.beam_width is not None
        if self.n > self.beam_width:
            raise InvalidRequestError(
                f"n must be at most beam_width ({self.beam_width}), got {self.n}", param="n"
            )
        neutral: dict[str, tuple[Any, ...]] = {
            "best_of": (None,),
            "temperature": (0.0, 1.0),
            "top_p": (1.0,),
            "top_k": (0,),
            "min_p": (0.0,),
            "presence_penalty": (0.0,),
            "frequency_penalty": (0.0,),
            "repetition_penalty": (1.0,),
            "logit_bias": ({},),
            "stop": ((),),
            "structured_output": (None,),
            "prompt_logprobs": (None,),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                raise InvalidRequestError(
                    f"{name} cannot be combined with beam_width; leave it at {values[0]!r}, "
                    f"got {getattr(self, name)!r}",
                    param=name,
                )

    @staticmethod
    def _checked_bias(bias: Any) -> dict[int, float]:
        if not isinstance(bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {bias!r}", param="logit_bias"
            )
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(bias)}", param="logit_bias"
            )
        checked = {}
        for key, value in bias.items():
            try:
                token = int(key) if isinstance(key, str) else _integer("logit_bias", key, 0, 2**31 - 1)
            except ValueError:
                raise InvalidRequestError(
                    f"logit_bias keys are token ids, got {key!r}", param="logit_bias"
                ) from None
            checked[token] = _number("logit_bias", value, -100.0, 100.0)
        return checked

    @staticmethod
    def _checked_stop(stop: Any) -> tuple[str, ...]:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop"
            )
        for text in strings:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"each stop is a string of 1 to {MAX_STOP_STRING_CHARS} characters, got {text!r:.80}",
                    param="stop",
                )
        return strings

    @staticmethod
    def _checked_stop_ids(ids: Any) -> tuple[int, ...]:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise InvalidRequestError(
                f"stop_token_ids must be a list of token ids, got {ids!r}", param="stop_token_ids"
            )
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}",
                param="stop_token_ids",
            )
        return tuple(_integer("stop_token_ids", token, 0, 2**31 - 1) for token in ids)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` for a `logit_bias` or `stop_token_ids` id outside [0, vocab_size)."""
        for token in self.logit_bias:
            _integer("logit_bias", token, 0, vocab_size - 1)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def num_branches(self) -> int:
        """Branches that run at once."""
        return self.beam_width or self.best_of or self.n

    @property
    def ranks_by_logprob(self) -> bool:
        """More branches are sampled than returned, so every chosen token's log-probability is needed."""
        return self.best_of is not None and self.best_of > self.n


def checked_prompt_ids(ids: Any, vocab_size: int, *, param: str = "prompt") -> Int32Array:
    """A prompt of token ids as a read-only int32 array of length >= 1.

    Raises `InvalidRequestError` for an empty prompt, an id that is not an integer or outside [0, vocab_size).
    """
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if len(ids) == 0:
        raise InvalidRequestError(f"{param} has no tokens; give at least one", param=param)
    # set(map(type, ...)) finds True and 1.5 at C speed; a Python loop over 8,000 ids would show.
    if set(map(type, ids)) - {int}:
        bad = next(token for token in ids if type(token) is not int)
        raise InvalidRequestError(f"{param} token ids must be integers, got {bad!r}", param=param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{param} token ids must be in [0, {vocab_size - 1}], got {bad}", param=param
        )
    prompt = np.asarray(ids, dtype=np.int32)
    prompt.flags.writeable = False
    return prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One validated, immutable call. `request_id` is ours and unique; a client's own id is never a key."""

    request_id: str
    prompt_token_ids: Int32Array
    """[P], P >= 1, read-only."""
    params: SamplingParams
    seed: int
    """Unsigned 64-bit key of the counter-based random numbers: `params.seed` (a negative one in two's complement),
    or one drawn at the front door."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of the model; empty when `params.ignore_eos`."""
    priority: int = 0
    """Lower goes first; first come, first served within one priority."""
    cache_salt: str = ""
    adapter: str = ""
    use_prefix_cache: bool = True
    timeout_seconds: float | None = None
    """From its arrival; then it is ended with `DeadlineExceededError`, since nobody waits any more. None: no limit."""
    tenant: str = ""
    """Who shares fairly with whom. Set by the front door from what it authenticated, never by the client."""
    trace_parent: str = ""
    """The caller's span, "00-TRACE-SPAN-FLAGS" as W3C's Trace Context writes it; empty: the request begins a trace."""
    fork_of: str = ""
    """Id of a request whose tokens the prompt begins with: while that one runs, its blocks are shared as they are."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def reads_prefix_cache(self) -> bool:
        """What is cached has no logits."""
        return self.use_prefix_cache and self.params.prompt_logprobs is None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a branch, once `min_tokens` are there."""
        return frozenset((*self.eos_token_ids, *self.params.stop_token_ids))

    @property
    def num_beam_candidates(self) -> int:
        """Likeliest tokens that a worker reports for each beam: enough that `beam_width` remain when every stop id is
        among them. 0 without beam search."""
        params = self.params
        if params.beam_width is None:
            return 0
        return max(params.beam_width + len(self.stop_ids), params.logprobs or 0)


def finish_reason(
    request: Request, num_output_tokens: int, token: int, max_tokens: int
) -> FinishReason | None:
    """Why a branch ends with `token` as its output token number `num_output_tokens` (1-based), or None.

    Scheduler and worker both call this: the worker masks rows of plans that were sent ahead, the scheduler
    frees blocks, and neither has to tell the other. `max_tokens` is the resolved limit of this request.
    Stop strings are text and are found where text is made.
    """
    if num_output_tokens >= request.params.min_tokens and (
        token in request.eos_token_ids or token in request.params.stop_token_ids
    ):
        return FinishReason.STOP
    if num_output_tokens >= max_tokens:
        return FinishReason.LENGTH
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewSequence:
    """A branch the worker has no row for: a first admission, or a return after recompute. Sent whole, once."""

    row: int
    request: Request
    branch: int
    max_tokens: int
    """Resolved: never None, already cut to what the model and the pool allow."""
    token_ids: Int32Array
    """[P + outputs so far]: the prompt, then what was already sampled."""
    num_computed_tokens: int
    """KV of the first so many tokens is in blocks that this plan's `block_updates` name (a prefix hit)."""


def _quads() -> Int32Array:
    return np.empty((0, 4), np.int32)


def _pairs() -> Int32Array:
    return np.empty((0, 2), np.int32)


def _triples() -> Int32Array:
    return np.empty((0, 3), np.int32)


def _ints() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one worker does in one step. Fields are listed in the order in which the worker carries them out.

    A row is the worker's slot for one branch (0 <= row < max_num_seqs); rows and block ids are the scheduler's
    to give. Running branches travel as deltas, so a steady decode costs 12 bytes a row, whatever its context.
    """

    step_id: int
    """1, 2, 3, ... without gaps within an epoch."""
    epoch: int
    """Who plans. A worker refuses plans of an older epoch, and the scheduler refuses such results (fencing)."""
    released_rows: Int32Array = field(default_factory=_ints)
    """[R] rows whose branch ended or was parked; free for this plan's new sequences and forks."""
    swaps_out: Int32Array = field(default_factory=_pairs)
    """[N, 2] (device block, host block): KV of parked requests or of prefixes that leave the device, copied before
    anything of this step overwrites it."""
    swaps_in: Int32Array = field(default_factory=_pairs)
    """[N, 2] (host block, device block): KV that comes back, after `swaps_out`. No host block is in both."""
    new_sequences: tuple[NewSequence, ...] = ()
    beam_moves: Int32Array = field(default_factory=_quads)
    """[M, 4] (parent row, row, branch, token): a hypothesis of a beam search goes on in `row`, either its parent's
    own or one not in use, with the parent's tokens and block table as the plan before left them, and then `token`.
    No row is moved into twice; all parents are read before any row is written."""
    block_updates: Int32Array = field(default_factory=_triples)
    """[U, 3] (row, index in its block table, block id): blocks appended, or replaced by copy-on-write. In order:
    the last of several updates of one entry counts."""
    forks: Int32Array = field(default_factory=_triples)
    """[F, 3] (parent row, child row, branch): the child takes the parent's tokens, limits and block table as
    they stand after `block_updates`, and samples from the parent's logits in this step."""
    block_copies: Int32Array = field(default_factory=_pairs)
    """[C, 2] (source, destination) whole blocks, all layers, before any write of this step. No destination is
    also a source."""
    rows: Int32Array = field(default_factory=_ints)
    """[S] rows that run, each once."""
    num_tokens: Int32Array = field(default_factory=_ints)
    """[S] tokens each runs, >= 1: 1 for a decode, more for a chunk. The sum is at most the token budget."""
    start_positions: Int32Array = field(default_factory=_ints)
    """[S] tokens already computed. The worker knows it too: sent as a checked assertion."""
    sample_rows: Int32Array = field(default_factory=_ints)
    """[K] rows that get one new token each; a row of a beam search reports its candidates in `StepResult.logprobs`
    instead, and gets its token by a move of a later plan."""
    sample_indices: Int32Array = field(default_factory=_ints)
    """[K] index into `rows` of the branch whose last logits to sample from (a fork's parent; else itself)."""

    @property
    def num_scheduled_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, natural log, of the raw distribution (before temperature and masks)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    """Likeliest first."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of one prompt."""

    start: int
    """Position of the first of these tokens; at least 1, since nothing foretells token 0."""
    entries: tuple[TokenLogprobs, ...]

    def after(self, num_known: int) -> tuple[TokenLogprobs, ...]:
        """Those of them that are new to who knows the first `num_known` of the prompt, token 1 being the first.

        A prompt that is computed again tells them again. Raises `IntegrityError` for a gap."""
        if self.start - 1 > num_known:
            raise IntegrityError(
                f"log-probabilities of prompt token {self.start} follow those of {num_known}"
            )
        return self.entries[num_known - (self.start - 1) :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What came of one plan, aligned with its `sample_rows`."""

    step_id: int
    epoch: int
    token_ids: Int32Array
    """[K]; `MASKED_TOKEN` where the row had already ended or failed."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """[K], or empty when no row asked."""
    prompt_logprobs: tuple[tuple[int, PromptLogprobs], ...] = ()
    """(index into the plan's `rows`, what this step has found of the row's prompt), for rows that asked."""
    row_errors: tuple[tuple[int, str], ...] = ()
    """(index into `sample_rows`, message): that branch's request failed; all others are sound."""
    step_seconds: float = 0.0
    """Wall time of the step on the worker."""
    parts_seconds: Mapping[str, float] = field(default_factory=dict)
    """Where it went: "prepare", "forward", "sample", and "swap" where the plan swaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front door must know of the model to refuse bad input before any work starts."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker found out about itself at start. Discovered, hence not configuration."""

    worker_id: str
    model: ModelInfo
    device: str
    """"cpu" or "cuda:0"."""
    dtype: str
    """Of weights and KV: "float32", "bfloat16", ..."""
    block_size: int
    num_blocks: int
    num_host_blocks: int
    """Blocks of swap space in host memory."""
    max_num_seqs: int
    """Rows."""
    kv_bytes_per_block: int
    """All layers, K and V."""
    prefill_tokens_per_second: float = 0.0
    """From the calibration at start; 0: not measured."""
    decode_step_seconds: float = 0.0
    """One row, short context; 0: not measured."""
    host_link_bytes_per_second: float = 0.0
    """Between device and host pool, from copies both ways at start: bytes moved by seconds. 0: no host blocks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPrefix:
    """Tokens whose KV a worker has in device blocks, whoever had it computed."""

    token_ids: Int32Array
    """[B * block_size]"""
    blocks: Int32Array
    """[B] in order."""
    cache_salt: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Timings and counts of one request, in every reply."""

    cached_tokens: int = 0
    """Prompt tokens whose KV was found at the first admission."""
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    """From arrival to first admission."""
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0
    recomputed_tokens: int = 0
    """Tokens computed again because of preemption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """New tokens of one branch. Over all deltas of a branch `offset` rises without gap or overlap."""

    request_id: str
    branch: int
    offset: int
    """Output tokens of this branch before these."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    """Of the request's prompt, in branch 0, before its first token or with it; maybe more than once."""
    finish_reason: FinishReason | None = None
    request_finished: bool = False
    """All branches have ended; nothing more comes for this request."""
    error: str | None = None
    """With ERROR or ABORT: one sentence."""
    error_name: str | None = None
    """Class of `errors.py`, for `errors.revive`."""
    metrics: RequestMetrics | None = None
    """With `request_finished`, and with the first token of the request."""
    score: float | None = None
    """With the end of a beam search's hypothesis: what it was ranked by. Branch 0 is the best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchSoFar:
    """One branch of a request that goes on elsewhere."""

    token_ids: Int32Array
    """[T] output tokens that its caller has."""
    finish_reason: FinishReason | None = None
    """Set when the branch has ended: its caller knows, and it is not computed further."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resume:
    """Where a request stands whose worker or coordinator was lost: it goes on from here as if nothing had happened.

    A token that was sampled and not handed on is sampled again, and is the same: its random number depends on
    (seed, branch, position) alone. Log-probabilities of earlier tokens have been handed on with them.
    """

    branches: tuple[BranchSoFar, ...] = ()
    """Every branch by number, each with at least one token unless it has ended; or none: nothing was handed on. Of a
    beam search always none, since its answer comes whole at its end."""
    metrics: RequestMetrics = RequestMetrics()
    """Up to now; `total_seconds` is the request's age."""

    @property
    def num_outputs(self) -> int:
        """Of all branches together."""
        return sum(len(branch.token_ids) for branch in self.branches)


def check_resume(request: Request, resume: Resume, max_tokens: int) -> None:
    """Raise `InvalidRequestError` unless `request`, limited to `max_tokens`, can stand where `resume` says."""
    params, branches = request.params, resume.branches
    if not branches:
        return
    if params.beam_width is not None:
        raise InvalidRequestError("a beam search has no tokens to go on from", param="resume")
    if len(branches) != params.num_branches:
        raise InvalidRequestError(
            f"{len(branches)} branches to go on from; the request has {params.num_branches}", param="resume"
        )
    if all(branch.finish_reason for branch in branches):
        raise InvalidRequestError("every branch has ended", param="resume")
    for number, branch in enumerate(branches):
        if branch.finish_reason is None and not 1 <= len(branch.token_ids) < max_tokens:
            raise InvalidRequestError(
                f"branch {number} has {len(branch.token_ids)} output tokens and has not ended; that takes 1 to "
                f"{max_tokens - 1}",
                param="resume",
            )
