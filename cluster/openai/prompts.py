"""Prompts to token ids, and calls to the `Request`s that the backend runs.

Owns everything that is checked before any work starts: ids, lengths, vocabulary, how many. Knows nothing of
replies.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.cluster.forking import TokensSoFar
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.messages import normalise_messages
from octavo.cluster.openai.schemas import Call, ChatCall, CompletionCall, ForkCall
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError, RequestTooLargeError
from octavo.protos.types import Int32Array, ModelInfo, Request, SamplingParams, checked_prompt_ids

SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text (None when it came as ids) and as checked ids."""

    token_ids: Int32Array
    text: str | None = None


async def completion_prompts(
    call: CompletionCall, tokenizer: Tokenizer, model: ModelInfo, config: HttpConfig
) -> list[Prompt]:
    """The prompts of `call`, in order. Raises `InvalidRequestError` (param "prompt") for any that is not one."""
    entries = _entries(call.prompt)
    if len(entries) > config.prompts_per_request_max:
        raise InvalidRequestError(
            f"prompt takes at most {config.prompts_per_request_max} prompts, got {len(entries)}",
            param="prompt",
        )
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            _refuse_endless(entry, tokenizer, model, _place(index, len(entries)), "prompt")

    def work() -> list[Prompt]:
        return [
            _prompt(entry, _place(index, len(entries)), call, tokenizer, model)
            for index, entry in enumerate(entries)
        ]

    return await tokenizer.run(work)


def _entries(prompt: Any) -> list[str | list[Any]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequestError(
            f"prompt must be a string, a list of strings, token ids or a list of these, got {prompt!r:.80}",
            param="prompt",
        )
    kinds = set(map(type, prompt))
    if kinds == {str} or kinds == {list}:
        return list(prompt)
    if str in kinds or list in kinds:
        raise InvalidRequestError("prompt must not mix strings, token ids and lists of them", param="prompt")
    return [prompt]


def _place(index: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt number {index}"


def _prompt(
    entry: str | list[Any], place: str, call: CompletionCall, tokenizer: Tokenizer, model: ModelInfo
) -> Prompt:
    ids = tokenizer.encode(entry, call.add_special_tokens) if isinstance(entry, str) else entry
    try:
        checked = checked_prompt_ids(ids, model.vocab_size)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}: {error.message}", param="prompt") from None
    return Prompt(checked, entry if isinstance(entry, str) else None)


async def chat_prompt(call: ChatCall, tokenizer: Tokenizer, model: ModelInfo, config: HttpConfig) -> Prompt:
    """The rendered conversation. Raises `InvalidRequestError` naming the message."""

    def work() -> Prompt:
        name = call.messages_field
        messages = normalise_messages(call.messages, config.messages_per_request_max, name)
        if call.instructions is not None:
            messages.insert(0, {"role": "system", "content": call.instructions})
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=call.add_generation_prompt,
            kwargs=call.template_kwargs,
            tools=call.tools.definitions if call.tools is not None else None,
        )
        _refuse_endless(text, tokenizer, model, "the conversation", name)
        ids = tokenizer.encode(text, call.add_special_tokens)
        return Prompt(checked_prompt_ids(ids, model.vocab_size, param=name), text)

    return await tokenizer.run(work)


def _refuse_endless(text: str, tokenizer: Tokenizer, model: ModelInfo, place: str, param: str) -> None:
    """Megabytes of text that cannot fit are not worth the seconds of tokenising them."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= model.max_model_len:
        raise RequestTooLargeError(
            f"{place} has at least {fewest} tokens; the limit is {model.max_model_len} for prompt and output",
            param=param,
        )


def build_requests(
    call: Call,
    prompts: Sequence[Prompt],
    model: ModelInfo,
    config: HttpConfig,
    *,
    prefix: str,
    param: str,
) -> list[Request]:
    """One `Request` a prompt, with ids of ours ("`prefix`-uuid", numbered when there are several).

    Raises `RequestTooLargeError` when a prompt and an explicit token limit cannot both be kept, and
    `InvalidRequestError` for token ids outside the vocabulary; `param` names the prompt's field.
    """
    params = call.params
    choices = len(prompts) * params.num_branches
    if choices > config.choices_per_request_max:
        name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
        raise InvalidRequestError(
            f"prompts times {name} is at most {config.choices_per_request_max}, got {choices}", param=name
        )
    call.params.check_vocab(model.vocab_size)
    base = f"{prefix}-{uuid.uuid4().hex}"
    return [
        Request(
            request_id=base if len(prompts) == 1 else f"{base}-{index}",
            prompt_token_ids=prompt.token_ids,
            params=_fitting_params(call, len(prompt.token_ids), model, param),
            seed=_seed(call.params),
            eos_token_ids=() if call.params.ignore_eos else model.eos_token_ids,
            priority=call.priority,
            timeout_seconds=call.timeout,
            cache_salt=call.cache_salt,
            use_prefix_cache=call.use_prefix_cache,
        )
        for index, prompt in enumerate(prompts)
    ]


def fork_request(call: ForkCall, parent: TokensSoFar, model: ModelInfo, config: HttpConfig) -> Request:
    """A request that goes on from where `parent` stands, under its salt and adapter whatever `call` says.

    Raises as `build_requests`.
    """
    (request,) = build_requests(
        call,
        [Prompt(parent.token_ids)],
        model,
        config,
        prefix="cmpl",
        param="request_id",
    )
    return replace(
        request,
        cache_salt=parent.cache_salt,
        adapter=parent.adapter,
        fork_of=call.request_id,
        # What a parent was to leave nowhere, its fork must not leave either.
        use_prefix_cache=request.use_prefix_cache and parent.use_prefix_cache,
    )


def _seed(params: SamplingParams) -> int:
    """The call's seed as an unsigned 64-bit number, or one drawn here, so that a resumed request repeats."""
    return secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**SEED_BITS


def _fitting_params(call: Call, num_prompt_tokens: int, model: ModelInfo, param: str) -> SamplingParams:
    """`call.params` with a default limit cut to the room that the prompt leaves."""
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt_tokens} tokens; the limit is {model.max_model_len} for prompt and "
            "output together",
            param=param,
        )
    asked = call.params.max_tokens
    if asked is None or asked <= room:
        return call.params
    if call.explicit_max_tokens:
        raise RequestTooLargeError(
            f"prompt of {num_prompt_tokens} plus max_tokens of {asked} is {num_prompt_tokens + asked} tokens; "
            f"the limit is {model.max_model_len}",
            param="max_tokens",
        )
    return replace(call.params, max_tokens=room)
