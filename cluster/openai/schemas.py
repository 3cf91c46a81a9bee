"""What a generation call may say: fields of OpenAI's API and vLLM's, turned into `SamplingParams` and options.

Owns which field is known, which is refused and what is left out means. The ranges of sampling numbers are
`SamplingParams`' own. A field that we know and do not serve is refused by name, because an answer that silently
lacks it would be wrong; a field that nobody knows is ignored and reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.cluster.openai import unsupported
from octavo.cluster.openai.body import Body
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import UnsupportedParameterError
from octavo.cluster.openai.structured import Wanted, wanted_output, wanted_text
from octavo.cluster.openai.tools import Tools, tools_of
from octavo.protos.errors import InvalidRequestError
from octavo.protos.types import MAX_LOGPROBS, MAX_N, SamplingParams

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat goes on to the model's limit."""
PRIORITY_MAX = 2**31 - 1
TIMEOUT_SECONDS_MAX = 86_400.0
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")

_SAMPLING_NAMES = (
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields that go to `SamplingParams` as they are."""

_STATELESS = "is not supported by this server, which keeps no responses: send the whole conversation as input"

_WITHOUT_EFFECT = (
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)
"""Bookkeeping of OpenAI's platform that changes no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What chat and text completions have in common, checked."""

    model: str | None
    params: SamplingParams
    explicit_max_tokens: bool
    """The caller named a limit: if it cannot be kept the call is refused, not cut."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """The counts so far in every chunk, too."""
    cache_salt: str = ""
    use_prefix_cache: bool = True
    priority: int = 0
    timeout: float | None = None
    """Seconds."""
    return_token_ids: bool = False
    add_special_tokens: bool = True
    without_output: bool = False
    """Only the prompt is asked for: `max_tokens` 0. One token is made all the same, and not told."""
    prompt_logprobs: int | None = None
    """Asked for by this name; `params` has the most that any field asks for."""
    output_param: str = ""
    """The field that says what the output must match, where one does."""
    ignored: tuple[str, ...] = ()
    """Fields that nobody knows, for the reply's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    prompt: Any
    """As given: text, ids, or a list of either; `prompts.py` checks it."""
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Call):
    messages: Any
    """As given; `messages.py` checks it."""
    logprobs: bool = False
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    instructions: str | None = None
    """A system message before all others."""
    messages_field: str = "messages"
    """What the caller named `messages`."""
    tools: Tools | None = None
    text_format: Mapping[str, Any] = field(default_factory=lambda: {"type": "text"})
    """Of a response, as given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCall(Call):
    request_id: str
    """Of the parent."""
    branch: int


def parse_completion(body: Body, config: HttpConfig) -> CompletionCall:
    """Raises `InvalidRequestError` naming the field."""
    if "prompt" not in body:
        raise InvalidRequestError("prompt is missing", param="prompt")
    prompt = body.any("prompt")
    body.refuse(unsupported.COMPLETIONS)
    echo = body.flag("echo")
    params, wanted = _completion_params(body, config, echo=echo)
    return CompletionCall(
        **_common(body, params, "max_tokens" in body),
        prompt=prompt,
        output_param=wanted,
        without_output=echo and _is_zero(body.any("max_tokens")),
        echo=echo,
        add_special_tokens=_special(body, True),
    )


def parse_fork(body: Body, config: HttpConfig) -> ForkCall:
    """Raises `InvalidRequestError` naming the field."""
    request_id = body.text("request_id")
    if not request_id:
        raise InvalidRequestError("request_id is missing", param="request_id")
    if "cache_salt" in body:
        raise UnsupportedParameterError("cache_salt", "cannot be chosen: a fork has its parent's")
    body.refuse(unsupported.FORK)
    params, wanted = _completion_params(body, config)
    branch = body.integer("branch", 0, 0, MAX_N - 1)
    return ForkCall(
        **_common(body, params, "max_tokens" in body),
        output_param=wanted,
        request_id=request_id,
        branch=branch,
    )


def _completion_params(body: Body, config: HttpConfig, *, echo: bool = False) -> tuple[SamplingParams, str]:
    """And the field that says what the output must match, or ""."""
    sampling = _sampling(body, config)
    wanted = _wanted(sampling, wanted_output(body))
    sampling["max_tokens"] = body.any("max_tokens") if "max_tokens" in body else COMPLETIONS_MAX_TOKENS
    if _is_zero(sampling["max_tokens"]) and echo:
        sampling["max_tokens"] = 1
    if "logprobs" in body:
        sampling["logprobs"] = body.any("logprobs")
    params = SamplingParams(**sampling)
    if echo and params.logprobs is not None:
        # The prompt is a part of the text then, and its tokens are told like all others.
        params = replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    return params, wanted


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def parse_chat(body: Body, config: HttpConfig) -> ChatCall:
    """Raises `InvalidRequestError` naming the field."""
    if "messages" not in body:
        raise InvalidRequestError("messages is missing", param="messages")
    messages = body.any("messages")
    body.refuse(unsupported.CHAT)
    tools = tools_of(body)
    sampling = _sampling(body, config)
    wanted = _wanted(sampling, wanted_output(body))
    if tools is not None:
        if wanted:
            raise InvalidRequestError(
                f"{wanted} cannot be combined with tools, whose calls it would forbid", param=wanted
            )
        forced = tools.structured_output()
        if forced is not None:
            wanted = _wanted(sampling, Wanted(forced, "tools"))
    limit_name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if "max_tokens" in body and body.any("max_tokens") != body.any(limit_name):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens are two names of one limit, and differ", param="max_tokens"
        )
    sampling["max_tokens"] = body.any(limit_name)
    logprobs = body.flag("logprobs")
    if "top_logprobs" in body and not logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if logprobs:
        sampling["logprobs"] = body.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    params = _params(sampling, limit_name)
    add_generation_prompt = body.flag("add_generation_prompt", True)
    special, kwargs = _special(body, False), template_kwargs(body)
    common = _common(body, params, limit_name in body)
    if tools is not None and tools.asks_strictness_in_vain:
        common["ignored"] += ("tools.function.strict",)
    return ChatCall(
        **common,
        messages=messages,
        output_param=wanted,
        tools=tools,
        logprobs=logprobs,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=kwargs,
        add_special_tokens=special,
    )


def template_kwargs(body: Body) -> Mapping[str, Any]:
    """Variables for the chat template. Raises `InvalidRequestError`."""
    given = body.any("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise InvalidRequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return given


def parse_response(body: Body, config: HttpConfig) -> ChatCall:
    """A call of /v1/responses: a chat whose messages are `input`. Raises `InvalidRequestError` naming the field."""
    if "input" not in body:
        raise InvalidRequestError("input is missing", param="input")
    for name in ("store", "previous_response_id"):
        if body.any(name) not in (None, False):
            raise UnsupportedParameterError(name, _STATELESS)
    messages = _input_messages(body.any("input"))
    body.refuse(unsupported.RESPONSES)
    text = body.object("text")
    if text is not None:
        text.refuse({"verbosity": ("medium",)})
    body.flag("parallel_tool_calls")
    sampling = _sampling(body, config)
    wanted = _wanted(sampling, wanted_text(text) if text is not None else None)
    sampling["max_tokens"] = body.any("max_output_tokens")
    params = _params(sampling, "max_output_tokens")
    instructions = body.text("instructions", chars_max=config.body_bytes_max)
    return ChatCall(
        **_common(body, params, "max_output_tokens" in body),
        messages=messages,
        output_param=wanted,
        instructions=instructions,
        text_format=(text.any("format") if text is not None else None) or {"type": "text"},
        messages_field="input",
        add_special_tokens=_special(body, False),
    )


def _input_messages(given: Any) -> Any:
    """Messages of an `input`, not checked beyond their being messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    for index, item in enumerate(given if isinstance(given, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            raise UnsupportedParameterError(
                f"input[{index}]", f"is of type {kind!r:.80}, and only messages are supported by this server"
            )
    return given


def _wanted(sampling: dict[str, Any], wanted: Wanted | None) -> str:
    """Put what the output must match among the sampling parameters; returns the field that said so, or ""."""
    if wanted is None:
        return ""
    sampling["structured_output"] = wanted.output
    return wanted.param


def _special(body: Body, default: bool) -> bool:
    return body.flag("add_special_tokens", default)


def _params(sampling: Mapping[str, Any], limit_name: str) -> SamplingParams:
    """`SamplingParams`, its complaints about `max_tokens` in the name that the caller used."""
    try:
        return SamplingParams(**sampling)
    except InvalidRequestError as error:
        if error.param != "max_tokens" or limit_name == "max_tokens":
            raise
        raise InvalidRequestError(
            error.message.replace("max_tokens", limit_name, 1), param=limit_name
        ) from None


def _sampling(body: Body, config: HttpConfig) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`, without the token limit and log-probabilities."""
    sampling = {name: body.any(name) for name in _SAMPLING_NAMES if name in body}
    if "stop" in body:
        stop = body.any("stop")
        if not isinstance(stop, (str, list)):
            raise InvalidRequestError(
                f"stop must be a string or a list of strings, got {stop!r:.80}", param="stop"
            )
        if isinstance(stop, list) and len(stop) > config.stop_strings_max:
            raise InvalidRequestError(
                f"stop takes at most {config.stop_strings_max} strings, got {len(stop)}", param="stop"
            )
        sampling["stop"] = stop if isinstance(stop, str) else tuple(stop)
    if "logit_bias" in body:
        bias = body.any("logit_bias")
        # int() would also take " 5", "+5", "5_0" and digits of other scripts.
        if isinstance(bias, dict) and not all(map(_TOKEN_ID.fullmatch, bias)):
            bad = next(key for key in bias if not _TOKEN_ID.fullmatch(key))
            raise InvalidRequestError(f"logit_bias keys are token ids, got {bad!r:.80}", param="logit_bias")
        sampling["logit_bias"] = bias
    return sampling


def _common(body: Body, params: SamplingParams, explicit_max_tokens: bool) -> dict[str, Any]:
    """Keyword arguments of `Call`. Called last: what nobody has asked for by now is unknown."""
    stream = body.flag("stream")
    if stream and params.ranks_by_logprob:
        raise InvalidRequestError(
            f"best_of above n ({params.n}) cannot be streamed: which choices are the best is known at the end",
            param="best_of",
        )
    include_usage = continuous_usage = False
    options = body.object("stream_options")
    if options is not None:
        if not stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        include_usage = options.flag("include_usage")
        options.flag("include_obfuscation")
        continuous_usage = options.flag("continuous_usage_stats")
        if continuous_usage and not include_usage:
            raise InvalidRequestError(
                "continuous_usage_stats needs include_usage", param="continuous_usage_stats"
            )
    common: dict[str, Any] = {
        "model": body.text("model"),
        "params": params,
        "explicit_max_tokens": explicit_max_tokens,
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
        "cache_salt": body.text("cache_salt", "") or "",
        "use_prefix_cache": body.flag("use_prefix_cache", True),
        "timeout": body.seconds("timeout", TIMEOUT_SECONDS_MAX),
        "priority": body.integer("priority", 0, -PRIORITY_MAX, PRIORITY_MAX),
        "return_token_ids": body.flag("return_token_ids"),
        "prompt_logprobs": body.any("prompt_logprobs"),
    }
    if stream and common["prompt_logprobs"] is not None:
        raise InvalidRequestError(
            "prompt_logprobs are told with a whole reply only; leave stream out", param="prompt_logprobs"
        )
    body.text("user")
    for name in (*_WITHOUT_EFFECT, "add_special_tokens"):
        body.any(name)
    common["ignored"] = tuple(body.unknown())
    return common
