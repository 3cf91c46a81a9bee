"""What /openapi.json says of calls and replies: for people who read it, generate clients from it or test by it.

Owns the description only. What is accepted is decided where bodies are read (`schemas.py`, `body.py`), which knows more
than a schema can say; a field that is missing here is not refused.
"""

from __future__ import annotations

from typing import Any

from octavo.cluster.client_protocol import CHAT_COMPLETIONS, COMPLETIONS
from octavo.cluster.openai.calls import FORK, RESPONSES

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _maybe(kind: str, **limits: Any) -> Schema:
    """Of a field that may be null, which is the same as leaving it out."""
    return {"type": [kind, "null"], **limits}


def _object(required: tuple[str, ...], properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_COUNT = _maybe("integer", minimum=1)
_FLAG = _maybe("boolean")
_SAMPLING: dict[str, Schema] = {
    "model": _maybe("string"),
    "max_tokens": _COUNT,
    "temperature": _maybe("number", minimum=0, maximum=2),
    "top_p": _maybe("number", exclusiveMinimum=0, maximum=1),
    "top_k": _maybe("integer", minimum=-1),
    "min_p": _maybe("number", minimum=0, maximum=1),
    "n": _maybe("integer", minimum=1, maximum=128),
    "best_of": _COUNT,
    "beam_width": _maybe("integer", minimum=1, maximum=32),
    "seed": _maybe("integer"),
    "stop": {"anyOf": [_maybe("string"), {"type": "array", "items": _TEXT, "maxItems": 4}]},
    "stop_token_ids": _maybe("array", items={"type": "integer", "minimum": 0}),
    "min_tokens": _maybe("integer", minimum=0),
    "ignore_eos": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "skip_special_tokens": _FLAG,
    "presence_penalty": _maybe("number", minimum=-2, maximum=2),
    "frequency_penalty": _maybe("number", minimum=-2, maximum=2),
    "repetition_penalty": _maybe("number", exclusiveMinimum=0),
    "logit_bias": _maybe("object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    "priority": _maybe("integer"),
    "timeout": _maybe("number", exclusiveMinimum=0),
    "cache_salt": _maybe("string", maxLength=1024),
    "use_prefix_cache": _FLAG,
    "return_token_ids": _FLAG,
    "stream": _FLAG,
    "stream_options": _maybe("object", properties={"include_usage": _FLAG}),
    "user": _maybe("string"),
}
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
_PROMPT: Schema = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]
}

_BODIES: dict[str, Schema] = {
    CHAT_COMPLETIONS: _object(
        ("messages",),
        {
            **_SAMPLING,
            "messages": _MESSAGES,
            "max_completion_tokens": _COUNT,
            "logprobs": _FLAG,
            "top_logprobs": _maybe("integer", minimum=0, maximum=20),
        },
    ),
    COMPLETIONS: _object(
        ("prompt",),
        {**_SAMPLING, "prompt": _PROMPT, "echo": _FLAG, "logprobs": _maybe("integer", minimum=0, maximum=20)},
    ),
    RESPONSES: _object(
        ("input",),
        {
            "model": _maybe("string"),
            "input": {"anyOf": [_TEXT, _MESSAGES]},
            "instructions": _maybe("string"),
            "max_output_tokens": _COUNT,
            "temperature": _SAMPLING["temperature"],
            "top_p": _SAMPLING["top_p"],
            "stream": _FLAG,
            "store": _FLAG,
        },
    ),
    FORK: _object(
        ("request_id",),
        {**_SAMPLING, "request_id": _TEXT, "branch": _maybe("integer", minimum=0)},
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
        ("tokens",), {"model": _maybe("string"), "tokens": _IDS, "skip_special_tokens": _FLAG}
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

_ERROR = _object(
    ("error",),
    {
        "error": _object(
            ("message", "type", "param", "code"),
            {"message": _TEXT, "type": _TEXT, "param": _maybe("string"), "code": _maybe("string")},
        )
    },
)
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The call is wrong, or nobody's turn.",
        "content": {"application/json": {"schema": _ERROR}},
    },
    "5XX": {"description": "The server cannot.", "content": {"application/json": {"schema": _ERROR}}},
}
"""Of every route, in place of the framework's own."""


def described(path: str, method: str) -> dict[str, Any]:
    """What a route's own code does not show: for FastAPI's `openapi_extra`."""
    if method == "GET":
        queries = _QUERIES.get(path, {})
        return {
            "parameters": [
                {"name": name, "in": "query", "schema": schema} for name, schema in queries.items()
            ]
        }
    if method != "POST":
        return {}
    if path == "/v1/files":
        return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}
    if path not in _BODIES:
        return {}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _BODIES[path]}}}}
