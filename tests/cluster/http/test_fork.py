"""POST /v1/fork: a completion that goes on from where a running request stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.cluster.forking import TokensSoFar
from octavo.cluster.tokenizer import Tokenizer

from .conftest import MODEL, Api, ScriptedBackend, error_of, events

PARENT = "cmpl-of-another-call"


@pytest.fixture
def parent(backend: ScriptedBackend, tokenizer: Tokenizer) -> TokensSoFar:
    """A running request that has said "Hello"."""
    ids = [*tokenizer.encode("Say hello."), 19556]
    found = TokensSoFar(
        token_ids=np.array(ids, np.int32),
        num_prompt_tokens=len(ids) - 1,
        cache_salt="tenant",
        adapter="lora",
    )
    backend.running[PARENT, 1] = found
    return found


def fork(api: Api, **fields: Any) -> Any:
    return api.post("/v1/fork", {"request_id": PARENT, "branch": 1, **fields})


def test_a_fork_answers_like_a_completion_with_what_comes_after(
    api: Api, backend: ScriptedBackend, parent: TokensSoFar
) -> None:
    backend.answer = lambda request, branch: [905, 17, 2]
    reply = fork(api, model=MODEL, n=2, seed=5, temperature=0.5, return_token_ids=True).json()
    assert reply["object"] == "text_completion"
    assert [choice["text"] for choice in reply["choices"]] == [" world!", " world!"]
    assert reply["fork"] == {"of": PARENT, "branch": 1, "at": 1}
    assert reply["usage"]["prompt_tokens"] == len(parent.token_ids)
    assert reply["prompt_token_ids"] == parent.token_ids.tolist()
    (request,) = backend.submitted
    assert request.request_id == reply["id"] != PARENT
    assert request.prompt_token_ids.tolist() == parent.token_ids.tolist()
    assert (request.fork_of, request.cache_salt, request.adapter) == (PARENT, "tenant", "lora")
    assert (request.params.n, request.params.max_tokens, request.seed) == (2, 16, 5)

    chunks = events(fork(api, stream=True, stream_options={"include_usage": True}))
    assert chunks.pop() == "[DONE]"
    assert all(chunk["fork"] == reply["fork"] for chunk in chunks)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == " world!"


def test_a_fork_inside_a_character_begins_with_its_end(
    api: Api, backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("\U0001f9ce")
    assert len(ids) > 1
    for at in range(len(ids)):
        backend.running[PARENT, 1] = TokensSoFar(
            token_ids=np.array([5, *ids[:at]], np.int32), num_prompt_tokens=1
        )
        backend.answer = lambda request, branch, at=at: [*ids[at:], 2]  # type: ignore[misc]
        assert fork(api).json()["choices"][0]["text"] == "\U0001f9ce"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"request_id": "cmpl-that-has-ended"}, 404, "request_id"),
        ({"request_id": None}, 400, "request_id"),
        ({"request_id": 5}, 400, "request_id"),
        ({"branch": -1}, 400, "branch"),
        ({"branch": "0"}, 400, "branch"),
        ({"cache_salt": "another tenant's"}, 400, "cache_salt"),
        ({"prompt": "more"}, 400, "prompt"),
        ({"echo": True}, 400, "echo"),
        ({"n": 2, "best_of": 1}, 400, "best_of"),
        ({"max_tokens": 8192}, 400, "max_tokens"),
        ({"model": "other"}, 404, "model"),
        ({"stop": 5}, 400, "stop"),
    ],
    ids=str,
)
def test_wrong_forks_are_refused(
    api: Api,
    backend: ScriptedBackend,
    parent: TokensSoFar,
    fields: dict[str, Any],
    status: int,
    param: str,
) -> None:
    error_of(fork(api, **fields), status, param)
    assert backend.submitted == []


def test_every_reply_names_its_running_requests(api: Api, backend: ScriptedBackend) -> None:
    """The ids are ours, whatever the client calls itself."""
    for send, fields in (
        (api.chat, {}),
        (api.chat, {"stream": True}),
        (api.complete, {"stream": True, "n": 2}),
    ):
        response = send(**fields)
        assert response.headers["x-octavo-request-id"] == backend.submitted[-1].request_id
    response = api.complete(prompt=["a", "b"])
    assert response.headers["x-octavo-request-id"].split(", ") == [
        request.request_id for request in backend.submitted[-2:]
    ]
    assert response.json()["id"] + "-1" == backend.submitted[-1].request_id
    response = api.complete(prompt=["a"] * 100)
    assert len(response.headers["x-octavo-request-id"].split(", ")) == 64
    response = api.send_complete({"x-request-id": "mine", "x-octavo-request-id": "mine"})
    assert response.headers["x-octavo-request-id"] != "mine"
