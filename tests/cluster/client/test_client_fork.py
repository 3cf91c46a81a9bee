"""Forks through the client: what is sent, what is known of a running stream, what is refused."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from octavo.cluster.client import AsyncClient, Client
from octavo.protos import errors
from octavo.protos.types import SamplingParams

from .conftest import FakeServer


def chunks(*texts: str, **fields: object) -> list[bytes]:
    events = [orjson.dumps({"choices": [{"index": 0, "text": text}], **fields}) for text in texts]
    return [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]


def test_a_running_stream_is_forked_by_itself_or_its_id(server: FakeServer) -> None:
    server.stream_events = chunks("Hel", "lo")
    params = SamplingParams(max_tokens=3, temperature=0)
    with Client(server.url) as client:
        stream = client.stream("p")
        assert stream.request_id == ""
        with pytest.raises(errors.InvalidRequestError) as caught:
            client.fork(stream)
        assert caught.value.param == "request"
        assert next(stream) == "Hel"
        assert stream.request_id == "cmpl-1"
        (output,) = client.fork(stream, params, branch=2).outputs
        assert output.text == "echo:cmpl-1"
        assert client.fork("cmpl-7").forked_at == 5
        assert "".join(stream) == "lo"
        assert stream.forked_at is None
    assert server.bodies[1] == {
        "model": "fake-model",
        "request_id": "cmpl-1",
        "branch": 2,
        "temperature": 0,
        "max_tokens": 3,
        "return_token_ids": True,
    }


def test_a_fork_streams_too(server: FakeServer) -> None:
    server.stream_events = chunks("a", "b", fork={"of": "cmpl-7", "branch": 0, "at": 4})

    async def test() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.fork_stream("cmpl-7")
            assert [piece async for piece in stream] == ["a", "b"]
            assert (stream.request_id, stream.forked_at) == ("cmpl-1", 4)

    asyncio.run(test())
    with Client(server.url) as client:
        fork = client.fork_stream("cmpl-7")
        assert next(fork) == "a"
        # A fork can be forked.
        assert client.fork_stream(fork).request_id == ""
        fork.close()


def test_refusals_of_forks_are_typed(server: FakeServer) -> None:
    server.fail(404, "not_found", "no request is running here")
    with Client(server.url) as client:
        with pytest.raises(errors.NotFoundError):
            client.fork("cmpl-7")
        with pytest.raises(errors.InvalidRequestError) as caught:
            client.fork("cmpl-7", SamplingParams(max_tokens=None))
        assert caught.value.param == "max_tokens"


def test_cache_fields_go_with_every_call(server: FakeServer) -> None:
    server.stream_events = chunks("x")
    with Client(server.url) as client:
        client.generate(["a", "b"], cache_salt="s", use_prefix_cache=False)
        list(client.stream("c", cache_salt="t"))
    assert [body.get("cache_salt") for body in server.bodies] == ["s", "s", "t"]
    assert [body.get("use_prefix_cache") for body in server.bodies] == [False, False, None]
