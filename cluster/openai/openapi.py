"""What /openapi.json says of calls and replies: for people who read it, generate clients from it or test by it.

Owns the description only. What is accepted is decided where bodies are read (`schemas.py`, `body.py`), which knows more
than a schema can say; a field that is missing here is not refused.
"""

from __future__ import annotations

from typing import Any

from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.cluster.openai.calls import FORK, RESPONSES
from octavo.cluster.openai.schemas import TIMEOUT_SECONDS_MAX
from octavo.protos.types import MAX_BEAM_WIDTH, MAX_LOGPROBS, MAX_N, ModelInfo

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}


def _maybe(kind: str, **limits: Any) -> Schema:
    """Of a field that may be null, which is the same as leaving it out."""
    return {"type": [kind, "null"], **limits}


def _object(required: tuple[str, ...], properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_FLAG = _maybe("boolean")
_PART = _object(("type",), {"type": {"enum": ["text"]}, "text": _TEXT})
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        ("role",),
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [_maybe("string"), {"type": "array", "items": _PART}]},
        },
    ),
}


_KINDS: dict[str, Schema] = {
    "json": {"type": ["object", "string", "null"]},
    "regex": _maybe("string"),
    "choice": _maybe("array", items=_TEXT, minItems=1),
    "grammar": _maybe("string"),
}
_STRUCTURED: dict[str, Schema] = {
    "response_format": _maybe(
        "object",
        properties={
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": _maybe(
                "object", properties={"name": _maybe("string"), "schema": {"type": "object"}}
            ),
        },
    ),
    **{f"guided_{name}": schema for name, schema in _KINDS.items()},
    "structured_outputs": _maybe("object", properties={**_KINDS, "json_object": _FLAG}),
    "prompt_logprobs": _maybe("integer", minimum=0, maximum=MAX_LOGPROBS),
}
_FUNCTION = _object(
    ("name",), {"name": _TEXT, "description": _maybe("string"), "parameters": _maybe("object")}
)
_TOOLS: dict[str, Schema] = {
    "tools": _maybe(
        "array",
        items=_object(("type", "function"), {"type": {"enum": ["function"]}, "function": _FUNCTION}),
        maxItems=128,
    ),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]},
    "parallel_tool_calls": _FLAG,
}


def _sampling(tokens: Schema, count: Schema) -> dict[str, Schema]:
    """Fields that all but responses share. `tokens`: an id of the vocabulary; `count`: of tokens that fit the model."""
    return {
        "model": _maybe("string"),
        "max_tokens": count,
        "temperature": _maybe("number", minimum=0, maximum=2),
        "top_p": _maybe("number", exclusiveMinimum=0, maximum=1),
        "top_k": _maybe("integer", minimum=-1),
        "min_p": _maybe("number", minimum=0, maximum=1),
        "n": _maybe("integer", minimum=1, maximum=MAX_N),
        "best_of": _maybe("integer", minimum=1, maximum=MAX_N),
        "beam_width": _maybe("integer", minimum=1, maximum=MAX_BEAM_WIDTH),
        "seed": _maybe("integer"),
        "stop": {"anyOf": [_maybe("string"), {"type": "array", "items": _TEXT, "maxItems": 4}]},
        "stop_token_ids": _maybe("array", items=tokens),
        "min_tokens": _maybe("integer", minimum=0),
        "ignore_eos": _FLAG,
        "include_stop_str_in_output": _FLAG,
        "skip_special_tokens": _FLAG,
        "presence_penalty": _maybe("number", minimum=-2, maximum=2),
        "frequency_penalty": _maybe("number", minimum=-2, maximum=2),
        "repetition_penalty": _maybe("number", minimum=0.01, maximum=10),
        "logit_bias": _maybe(
            "object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}
        ),
        "priority": _maybe("integer"),
        "timeout": _maybe("number", exclusiveMinimum=0, maximum=TIMEOUT_SECONDS_MAX),
        "cache_salt": _maybe("string", maxLength=1024),
        "use_prefix_cache": _FLAG,
        "return_token_ids": _FLAG,
        "stream": _FLAG,
        "stream_options": _maybe(
            "object", properties={"include_usage": _FLAG, "continuous_usage_stats": _FLAG}
        ),
        "user": _maybe("string"),
    }


def _bodies(model: ModelInfo) -> dict[str, Schema]:
    """Path -> what a POST there holds, for this model."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    count = _maybe("integer", minimum=1, maximum=model.max_model_len)
    ids: Schema = {"type": "array", "items": token, "minItems": 1}
    texts: Schema = {"type": "array", "items": _TEXT, "minItems": 1}
    prompt: Schema = {"anyOf": [_TEXT, texts, ids, {"type": "array", "items": ids, "minItems": 1}]}
    sampling, top = _sampling(token, count), _maybe("integer", minimum=0, maximum=MAX_LOGPROBS)
    return {
        CHAT_COMPLETIONS: _object(
            ("messages",),
            {
                **sampling,
                **_STRUCTURED,
                **_TOOLS,
                "messages": _MESSAGES,
                "max_completion_tokens": count,
                "logprobs": _FLAG,
                "top_logprobs": top,
            },
        ),
        COMPLETIONS: _object(
            ("prompt",), {**sampling, **_STRUCTURED, "prompt": prompt, "echo": _FLAG, "logprobs": top}
        ),
        RESPONSES: _object(
            ("input",),
            {
                "input": {"anyOf": [_TEXT, _MESSAGES]},
                "instructions": _maybe("string"),
                "max_output_tokens": count,
                "store": _FLAG,
                **{name: sampling[name] for name in ("model", "temperature", "top_p", "stream")},
            },
        ),
        FORK: _object(
            ("request_id",), {**sampling, "request_id": _TEXT, "branch": _maybe("integer", minimum=0)}
        ),
        "/tokenize": _object(
            (),
            {
                "model": _maybe("string"),
                "prompt": _TEXT,
                "messages": _MESSAGES,
                "add_special_tokens": _FLAG,
                "return_token_strs": _FLAG,
            },
        ),
        "/detokenize": _object(
            ("tokens",), {"model": _maybe("string"), "tokens": ids, "skip_special_tokens": _FLAG}
        ),
        "/v1/batches": _object(
            ("input_file_id", "endpoint"),
            {
                "input_file_id": _TEXT,
                "endpoint": {"enum": [CHAT_COMPLETIONS, COMPLETIONS, RESPONSES]},
                "completion_window": _maybe("string"),
                "metadata": _maybe("object", additionalProperties=_TEXT, maxProperties=16),
            },
        ),
    }


_UPLOAD = _object(
    ("file", "purpose"), {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}
)
_QUERIES: dict[str, dict[str, Schema]] = {
    "/v1/files": {
        "purpose": _TEXT,
        "order": {"enum": ["asc", "desc"]},
        "after": _TEXT,
        "limit": {"type": "integer"},
    },
    "/v1/batches": {"after": _TEXT, "limit": {"type": "integer"}},
}
_OTHER_TYPES: dict[str, str] = {
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/octet-stream",
    **dict.fromkeys((CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, FORK), "text/event-stream"),
}
"""Of good replies beside JSON."""

_ERROR = _object(
    ("error",),
    {
        "error": _object(
            ("message", "type", "param", "code"),
            {"message": _TEXT, "type": _TEXT, "param": _maybe("string"), "code": _maybe("string")},
        )
    },
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in (("4XX", "The call is wrong, or nobody's turn."), ("5XX", "The server cannot."))
}
"""Of every route, in place of the framework's own."""


class Described:
    """What the routes' own code does not show: arguments for `FastAPI.add_api_route`."""

    def __init__(self, model: ModelInfo) -> None:
        self._bodies = _bodies(model)

    def __call__(self, path: str, method: str) -> dict[str, Any]:
        good: Schema = {} if path not in _OTHER_TYPES else {_OTHER_TYPES[path]: {}}
        return {
            "response_model": None,
            "responses": {200: {"content": good}, **_ERRORS},
            "openapi_extra": self._call(path, method),
        }

    def _call(self, path: str, method: str) -> dict[str, Any]:
        if method == "GET":
            queries = _QUERIES.get(path, {})
            return {
                "parameters": [
                    {"name": name, "in": "query", "schema": schema} for name, schema in queries.items()
                ]
            }
        if (path, method) == ("/v1/files", "POST"):
            return {
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
            }
        if method != "POST" or path not in self._bodies:
            return {}
        content = {"application/json": {"schema": self._bodies[path]}}
        return {"requestBody": {"required": True, "content": content}}
