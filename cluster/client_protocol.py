"""What the client says over HTTP and what it makes of the answers; pure functions and values, no I/O.

Owns: prompts and `SamplingParams` to OpenAI request bodies, replies to `RequestOutput`, refusals to the
errors of `errors.py`, the bytes of a server-sent event stream to JSON objects, and when a try may be
repeated. Knows nothing of sockets, event loops or httpx (`client.py` does).
"""

from __future__ import annotations

import email.utils
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from octavo.cluster.outputs import CompletionOutput, RequestOutput
from octavo.protos import errors
from octavo.protos.structured_output import OutputKind
from octavo.protos.types import RequestMetrics, SamplingParams, TokenLogprobs

ChatMessage = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
FORK = "/v1/fork"

REQUEST_ID_HEADER = "x-octavo-request-id"

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Full, or a part is away for now. 500 is not among them: it says that this very request failed."""
BACKOFF_SECONDS_FIRST = 0.5
BACKOFF_SECONDS_MAX = 20.0
RETRY_AFTER_SECONDS_MAX = 120.0
"""A server that asks for a longer wait gets no further try; the caller decides."""
MAX_EVENT_BYTES = 16 * 2**20
"""Of one server-sent event; a longer one is no answer of ours."""
MAX_ERROR_TEXT_CHARS = 500


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """`prompts` as a list of prompts; one bare text, list of token ids or chat counts as a list of one.

    Raises `InvalidRequestError` naming the index of an entry that is none of the three.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)):
        raise errors.InvalidRequestError(
            "prompts must be a list of texts, token ids or chats", param="prompts"
        )
    entries = _plain(prompts)
    if entries and (_all_ints(entries) or _all_messages(entries)):
        entries = [entries]
    return [_checked_prompt(index, entry) for index, entry in enumerate(entries)]


def is_chat(prompt: Prompt) -> bool:
    """Whether `prompt` is a list of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and _all_messages(prompt)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts. Raises `InvalidRequestError` when the counts
    differ.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    listed = list(params)
    if len(listed) != count:
        raise errors.InvalidRequestError(
            f"params must be one SamplingParams or one for each prompt: {count} prompts, {len(listed)} given",
            param="params",
        )
    return listed


def _plain(values: Any) -> list[Any]:
    tolist = getattr(values, "tolist", None)
    return tolist() if callable(tolist) else list(values)


def _all_ints(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int}


def _all_messages(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _checked_prompt(index: int, entry: Any) -> Prompt:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, (bytes, Mapping)):
        try:
            values = _plain(entry)
        except TypeError:
            values = []
        # An empty list is left to the server, which says what an empty prompt means.
        empty = isinstance(entry, Sequence) and not values
        if empty or (values and (_all_ints(values) or _all_messages(values))):
            return values
    raise errors.InvalidRequestError(
        f"prompts[{index}] must be text, a list of token ids or a list of chat messages, got {entry!r:.80}",
        param="prompts",
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One POST."""

    path: str
    body: dict[str, Any]


def build_call(
    prompt: Prompt,
    params: SamplingParams,
    *,
    model: str,
    stream: bool = False,
    cache_salt: str = "",
    use_prefix_cache: bool = True,
) -> Call:
    """The OpenAI request for one prompt.

    Only what differs from a default travels, besides what OpenAI's own defaults would change, so the call
    also works with servers that know fewer fields.
    """
    body: dict[str, Any] = {"model": model}
    chat = is_chat(prompt)
    if chat:
        body["messages"] = list(prompt)
    else:
        body["prompt"] = prompt
    body.update(_params_body(params, chat=chat))
    if cache_salt:
        body["cache_salt"] = cache_salt
    if not use_prefix_cache:
        body["use_prefix_cache"] = False
    body["stream" if stream else "return_token_ids"] = True
    return Call(CHAT_COMPLETIONS if chat else COMPLETIONS, body)


def build_fork(
    request_id: str, branch: int, params: SamplingParams, *, model: str, stream: bool = False
) -> Call:
    """The call that goes on from one branch of a running request.

    Raises `InvalidRequestError` without a `max_tokens`: how much room is left is the server's to know.
    """
    if not request_id:
        raise errors.InvalidRequestError(
            "the request is not known to run yet: a stream has its id from its first piece on",
            param="request",
        )
    if params.max_tokens is None:
        raise errors.InvalidRequestError("a fork needs max_tokens", param="max_tokens")
    body = {"model": model, "request_id": request_id, "branch": branch, **_params_body(params, chat=False)}
    body["stream" if stream else "return_token_ids"] = True
    return Call(FORK, body)


_SPECIAL_FIELDS = frozenset(
    {"max_tokens", "temperature", "logprobs", "logit_bias", "stop", "stop_token_ids", "structured_output"}
)
_STRUCTURED_FIELDS = {
    OutputKind.JSON_SCHEMA: "json",
    OutputKind.JSON_OBJECT: "json_object",
    OutputKind.REGEX: "regex",
    OutputKind.CHOICE: "choice",
    OutputKind.GRAMMAR: "grammar",
}


def _params_body(params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": params.temperature}
    for spec in fields(params):
        if spec.name not in _SPECIAL_FIELDS:
            value = getattr(params, spec.name)
            if value != spec.default:
                body[spec.name] = value
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.stop:
        body["stop"] = list(params.stop)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if (wanted := params.structured_output) is not None:
        body["structured_outputs"] = {_STRUCTURED_FIELDS[wanted.kind]: wanted.value}
    if params.logprobs is not None:
        body["logprobs"] = True if chat else params.logprobs
        if chat:
            body["top_logprobs"] = params.logprobs
    return body


def parse_output(prompt: Prompt | None, reply: Any, *, seconds: float) -> RequestOutput:
    """The result in one OpenAI reply. `seconds`: how long the call took here, for a server that gives no
    timings.

    Raises `RequestFailedError` when the reply is not of that shape.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        ids = reply.get("prompt_token_ids") or (choices[0].get("prompt_token_ids") if choices else None) or ()
        return RequestOutput(
            request_id=str(reply["id"]),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(ids),
            outputs=tuple(_parse_choice(choice) for choice in choices),
            prompt_logprobs=_parse_prompt_logprobs(reply, choices, ids),
            metrics=_parse_metrics(reply, seconds),
            forked_at=parse_forked_at(reply),
        )
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as problem:
        raise errors.RequestFailedError(
            f"the server's answer is not an OpenAI completion ({type(problem).__name__}: {problem})"
        ) from problem


def parse_forked_at(reply: Any) -> int | None:
    """Outputs of the parent that a fork's reply, or one of its chunks, says it goes on from; None for others."""
    fork = reply.get("fork") if isinstance(reply, Mapping) else None
    return fork["at"] if isinstance(fork, Mapping) and isinstance(fork.get("at"), int) else None


def _parse_choice(choice: Mapping[str, Any]) -> CompletionOutput:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    logprobs = _parse_logprobs(choice.get("logprobs"))
    return CompletionOutput(
        index=choice["index"],
        text=text or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice.get("finish_reason"),
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs if entry),
        score=choice.get("score"),
    )


def _parse_logprobs(block: Mapping[str, Any] | None) -> tuple[TokenLogprobs | None, ...] | None:
    """OpenAI names likely tokens by text, so `top_ids` is filled only where the server adds `top_token_ids`."""
    if block is None:
        return None
    if block.get("content") is not None:
        chosen = [entry["logprob"] for entry in block["content"]]
        tops = [[top["logprob"] for top in entry.get("top_logprobs") or ()] for entry in block["content"]]
    else:
        chosen = block.get("token_logprobs") or []
        tops = [list((entry or {}).values()) for entry in block.get("top_logprobs") or [{}] * len(chosen)]
    top_ids = block.get("top_token_ids")
    if top_ids is not None:
        # A completion lists the chosen token too when it is not among the likeliest; the ids do not.
        tops = [values[: len(ids)] for values, ids in zip(tops, top_ids, strict=True)]
    else:
        top_ids = [()] * len(chosen)
    return tuple(
        None if logprob is None else TokenLogprobs(logprob, tuple(ids), tuple(values))
        for logprob, ids, values in zip(chosen, top_ids, tops, strict=True)
    )


def _parse_prompt_logprobs(
    reply: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], ids: Sequence[int]
) -> tuple[TokenLogprobs | None, ...] | None:
    """vLLM's shape: an object a token, whose likeliest have a rank; completions have it in their choices."""
    told = reply.get("prompt_logprobs") or (choices[0].get("prompt_logprobs") if choices else None)
    if told is None or len(told) != len(ids):
        return None
    found: list[TokenLogprobs | None] = []
    for token, entry in zip(ids, told, strict=True):
        if entry is None:
            found.append(None)
            continue
        likeliest = sorted((one["rank"], int(key)) for key, one in entry.items() if one.get("rank"))
        top_ids = tuple(key for _, key in likeliest)
        top_logprobs = tuple(entry[str(key)]["logprob"] for key in top_ids)
        found.append(TokenLogprobs(entry[str(token)]["logprob"], top_ids, top_logprobs))
    return tuple(found)


def _parse_metrics(reply: Mapping[str, Any], seconds: float) -> RequestMetrics:
    usage = reply.get("usage") or {}
    found: dict[str, Any] = {
        "total_seconds": seconds,
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }
    told = reply.get("metrics") or {}
    found.update(
        {spec.name: told[spec.name] for spec in fields(RequestMetrics) if told.get(spec.name) is not None}
    )
    return RequestMetrics(**found)


def parse_delta(event: Any) -> str:
    """Text of branch 0 in one streamed chunk; "" for a chunk without any. Raises the error that a chunk
    carries.
    """
    try:
        if event.get("error") is not None:
            raise error_from_body(500, event)
        for choice in event["choices"]:
            if choice["index"] == 0:
                return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        return ""
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise errors.RequestFailedError(
            f"the server's stream is not of OpenAI's shape ({type(problem).__name__}: {problem})"
        ) from problem


class EventDecoder:
    """Turns the bytes of a `text/event-stream` into the data of its events.

    Lines end in LF or CRLF and nothing else. Splitting decoded text would also cut at U+2028 and U+0085,
    which JSON may carry raw inside a string.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `chunk` completes. Raises `RequestFailedError` over the size
        limit.
        """
        lines = (self._pending + chunk).split(b"\n")
        self._pending = lines.pop()
        for line in lines:
            yield from self._line(line.removesuffix(b"\r"))
        if len(self._pending) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise errors.RequestFailedError(f"a streamed event is longer than {MAX_EVENT_BYTES} bytes")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
                self._data = []
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))


def error_from_body(
    status: int, body: Any, *, retry_after_seconds: float | None = None
) -> errors.OctavoError:
    """The error of `errors.py` that a refusal means: by OpenAI's `code` where we know it, else by HTTP
    status.
    """
    detail = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(detail, Mapping):
        message, code, param = detail.get("message"), detail.get("code"), detail.get("param")
    else:
        message, code, param = detail if isinstance(detail, str) else None, None, None
    if not isinstance(message, str) or not message:
        text = body if isinstance(body, str) else ""
        message = f"the server answered HTTP {status}" + (f": {text[:MAX_ERROR_TEXT_CHARS]}" if text else "")
    kind = _kind_of(status, code)
    error = kind(message)
    error.param = param if isinstance(param, str) else error.param
    error.code = code if isinstance(code, str) else error.code
    if isinstance(error, errors.OverloadedError) and retry_after_seconds is not None:
        error.retry_after_seconds = retry_after_seconds
    return error


_BY_STATUS: dict[int, type[errors.OctavoError]] = {
    401: errors.AuthenticationError,
    403: errors.AuthenticationError,
    404: errors.NotFoundError,
    413: errors.RequestTooLargeError,
    429: errors.OverloadedError,
    502: errors.UnavailableError,
    503: errors.UnavailableError,
    504: errors.UnavailableError,
}
_BY_CODE: dict[object, type[errors.OctavoError]] = {
    kind.code: kind
    for kind in (
        errors.RequestTooLargeError,
        errors.OverloadedError,
        errors.UnavailableError,
        errors.WorkerLostError,
        errors.RequestFailedError,
        errors.PlanRejectedError,
        errors.IntegrityError,
    )
}


def _kind_of(status: int, code: Any) -> type[errors.OctavoError]:
    if isinstance(code, str) and code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return errors.InvalidRequestError if 400 <= status < 500 else errors.RequestFailedError


def parse_body(content: bytes) -> Any:
    """JSON of a reply; the text itself when it is not JSON (a proxy's page)."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content[: 4 * MAX_ERROR_TEXT_CHARS].decode("utf-8", "replace")


def parse_retry_after(value: str | None, *, now: float) -> float | None:
    """Seconds in a `Retry-After` header, given as seconds or as an HTTP date; None when absent or unreadable.

    `now`: seconds since the epoch, for a date.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (TypeError, ValueError):
            return None
    return max(0.0, seconds) if seconds == seconds else None


def backoff_seconds(attempt: int, retry_after: float | None, uniform: float) -> float | None:
    """How long to wait before try `attempt` + 1 (the first try is 1); None: do not try again.

    Doubles from `BACKOFF_SECONDS_FIRST` to `BACKOFF_SECONDS_MAX`, of which `uniform` in [0, 1) takes off up
    to half, so that clients refused together do not return together. A server's own figure is a lower bound.
    """
    if retry_after is not None and retry_after > RETRY_AFTER_SECONDS_MAX:
        return None
    # 2**10 already exceeds the maximum; a larger exponent would only overflow.
    wait = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_FIRST * 2.0 ** min(attempt - 1, 10)) * (1 - uniform / 2)
    return wait if retry_after is None else retry_after + wait * 0.1
