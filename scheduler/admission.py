"""What can never run is refused before any work, with the numbers; what may run gets its limit of output tokens."""

from __future__ import annotations

from octavo.protos.errors import RequestTooLargeError
from octavo.protos.types import Request
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.kv_manager import blocks_for


def peak_blocks(num_prompt_tokens: int, max_tokens: int, n: int, block_size: int) -> int:
    """Most blocks that a request can hold: full prompt blocks once, the rest for each branch.

    The last output token is never computed, so it needs no slot.
    """
    shared = num_prompt_tokens // block_size if n > 1 else 0
    return shared + n * (blocks_for(num_prompt_tokens + max_tokens - 1, block_size) - shared)


def resolve_max_tokens(request: Request, config: SchedulerConfig) -> int:
    """Output tokens that a branch may get. Raises `RequestTooLargeError` for what can never fit.

    A `max_tokens` that was asked for is kept or refused; None is cut to what the model and the pool allow.
    """
    prompt, n = request.num_prompt_tokens, request.params.num_branches
    if prompt + 1 > config.max_model_len:
        raise RequestTooLargeError(
            f"the prompt has {prompt} tokens; the limit is {config.max_model_len} for prompt and output together",
            param="prompt",
        )
    param = "beam_width" if request.params.beam_width else "best_of" if request.params.best_of else "n"
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    if n > most:
        raise RequestTooLargeError(
            f"{param} is {n}, and at most {most} branches run at once "
            f"(max_num_seqs {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens})",
            param=param,
        )
    asked = request.params.max_tokens
    if asked is not None:
        if prompt + asked > config.max_model_len:
            raise RequestTooLargeError(
                f"prompt of {prompt} plus max_tokens of {asked} is {prompt + asked} tokens; "
                f"the limit is {config.max_model_len}",
                param="max_tokens",
            )
        need = peak_blocks(prompt, asked, n, config.block_size)
        if need > config.num_blocks:
            raise RequestTooLargeError(
                f"the request may need {need} KV blocks of {config.block_size} tokens "
                f"(prompt {prompt}, max_tokens {asked}, {param} {n}); the pool has {config.num_blocks}",
                param="prompt"
                if peak_blocks(prompt, 1, n, config.block_size) > config.num_blocks
                else "max_tokens",
            )
        return asked
    shared = prompt // config.block_size if n > 1 else 0
    slots = (config.num_blocks - shared) // n * config.block_size + shared * config.block_size
    limit = min(config.max_model_len - prompt, slots - prompt + 1)
    if limit < 1:
        need = peak_blocks(prompt, 1, n, config.block_size)
        raise RequestTooLargeError(
            f"the request needs {need} KV blocks of {config.block_size} tokens for its prompt of {prompt} "
            f"and {param} {n}; the pool has {config.num_blocks}",
            param="prompt",
        )
    return limit
