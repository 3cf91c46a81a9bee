"""Errors in OpenAI's shape, whatever is wrong with the exchange (cases D17 and D21)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from octavo.cluster.openai.config import HttpConfig
from octavo.protos.errors import ConfigError

from .conftest import MODEL, Api, ScriptedBackend, error_of


def test_d17_bodies_that_are_no_call(api: Api) -> None:
    error_of(api.post("/v1/chat/completions", "not json"), 400)
    error_of(api.post("/v1/chat/completions", b"\xff\xfe"), 400)
    error_of(api.post("/v1/chat/completions", b""), 400)
    error_of(api.post("/v1/chat/completions", "[" * 5000), 400)
    error_of(api.post("/v1/chat/completions", "[]"), 400)
    error_of(api.post("/v1/chat/completions", '"text"'), 400)
    error_of(api.post("/v1/chat/completions", {}), 400, "messages")
    error_of(api.post("/v1/chat/completions", {"model": MODEL}), 400, "messages")
    error_of(api.post("/v1/chat/completions", {"model": MODEL, "messages": None}), 400, "messages")
    error_of(api.post("/v1/completions", {"model": MODEL}), 400, "prompt")


def test_d17_an_unknown_model(api: Api) -> None:
    for response in (api.chat(model="gpt-9"), api.complete(model="gpt-9"), api.get("/v1/models/gpt-9")):
        error = error_of(response, 404, "model")
        assert error["code"] == "model_not_found"
        assert error["type"] == "invalid_request_error"


def test_d17_a_wrong_content_type(api: Api) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
    ):
        response = api.post("/v1/completions", {"prompt": "x"}, headers={"content-type": kind})
        assert error_of(response, 400)["code"] == "unsupported_media_type"
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert api.post("/v1/completions", {"prompt": "x"}, headers={"content-type": kind}).status_code == 200


def test_d17_wrong_methods_and_paths(api: Api) -> None:
    response = api.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(api.post("/v1/models", {}), 405)
    for path in ("/v1/nope", "/", "/v1/models/", "/v1/completions/", "/" + "x" * 3000):
        error_of(api.get(path), 404)


def test_d17_models(api: Api, make_api: Callable[..., Api]) -> None:
    (model,) = api.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 8192)
    assert api.get(f"/v1/models/{MODEL}").json() == model
    named = make_api(served_model_names=("org/small", "alias"))
    assert [model["id"] for model in named.get("/v1/models").json()["data"]] == ["org/small", "alias"]
    assert named.get("/v1/models/org/small").json()["id"] == "org/small"
    assert named.complete(model="alias").json()["model"] == "alias"
    assert named.complete(model=None).json()["model"] == "org/small"
    error_of(named.complete(model=MODEL), 404, "model")


def test_a_body_over_the_limit(make_api: Callable[..., Api]) -> None:
    api = make_api(body_bytes_max=2000)
    assert api.complete(prompt="x" * 100).status_code == 200
    assert error_of(api.complete(prompt="x" * 3000), 413)["code"] == "body_too_large"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    # Without a length it is counted while it comes.
    headers = {"content-type": "application/json"}
    error_of(api.send("POST", "/v1/completions", content=pieces(), headers=headers), 413)


def test_a_body_that_never_comes(make_api: Callable[..., Api]) -> None:
    api = make_api(body_seconds_max=0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    headers = {"content-type": "application/json"}
    assert error_of(api.send("POST", "/v1/completions", content=slow(), headers=headers), 408)


def test_d21_the_clients_id_is_echoed_and_never_a_key(api: Api, backend: ScriptedBackend) -> None:
    headers = {"x-request-id": "same"}
    replies = [api.complete(), *(api.send_complete(headers) for _ in range(2))]
    assert replies[0].headers["x-request-id"].startswith("req-")
    assert [reply.headers["x-request-id"] for reply in replies[1:]] == ["same", "same"]
    ids = {request.request_id for request in backend.submitted}
    assert len(ids) == 3
    assert not any("same" in request_id for request_id in ids)
    assert len({reply.json()["id"] for reply in replies}) == 3
    assert api.get("/nope", headers=headers).headers["x-request-id"] == "same"


def test_d21_two_streams_with_one_id_do_not_mix(api: Api, backend: ScriptedBackend) -> None:
    backend.answer = lambda request, branch: [int(request.prompt_token_ids[0])] * 20

    async def both() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            calls = [
                client.post(
                    "/v1/completions",
                    json={"prompt": [token], "stream": True, "max_tokens": 20},
                    headers={"x-request-id": "same"},
                )
                for token in (64, 65)
            ]
            return list(await asyncio.gather(*calls))

    first, second = asyncio.run(both())
    assert "Q" not in first.text.replace("Qu", "").split('"text":', 1)[1]
    assert first.text.count('"text":"P') >= 1
    assert second.text.count('"text":"Q') >= 1
    assert '"text":"P' not in second.text


def test_d21_headers_over_the_limit(api: Api, backend: ScriptedBackend) -> None:
    error_of(api.get("/v1/models", headers={"x-request-id": "x" * 257}), 431)
    error_of(api.get("/v1/models", headers={"x-request-id": "x" * 2**20}), 431)
    error_of(api.get("/v1/models", headers={"x-other": "x" * 40_000}), 431)
    long_enough = api.get("/v1/models", headers={"x-request-id": "x" * 256})
    assert long_enough.headers["x-request-id"] == "x" * 256


def test_api_keys(make_api: Callable[..., Api]) -> None:
    api = make_api(api_keys=("first-key", "second-key"))
    for header in (None, "first-key", "Basic first-key", "Bearer ", "Bearer wrong", "Bearer first-key2"):
        headers = {} if header is None else {"authorization": header}
        response = api.get("/v1/models", headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key"):
        assert api.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
    assert api.get("/nope").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert api.get(path).status_code == 200


def test_a_full_house_is_429_and_health_still_answers(
    make_api: Callable[..., Api], backend: ScriptedBackend
) -> None:
    api = make_api(requests_in_flight_max=2, retry_after_seconds=3.0)

    async def scenario() -> tuple[list[int], httpx.Response, httpx.Response]:
        release = asyncio.Event()

        async def wait(request: Any, step: int) -> None:
            await release.wait()

        backend.before_step = wait
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            running = [
                asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"})) for _ in range(2)
            ]
            while len(backend.submitted) < 2:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            health = await client.get("/health")
            release.set()
            done = await asyncio.gather(*running)
        return [reply.status_code for reply in done], refused, health

    statuses, refused, health = asyncio.run(scenario())
    assert statuses == [200, 200]
    assert error_of(refused, 429)["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "3"
    assert health.status_code == 200


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("body_bytes_max", 0),
        ("body_bytes_max", 1.5),
        ("health_seconds_max", float("nan")),
        ("stream_flush_seconds_max", -1),
        ("retry_after_seconds", "1"),
        ("api_keys", "key"),
        ("api_keys", ("",)),
        ("served_model_names", (1,)),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpConfig(**{option: value})
    assert caught.value.param == option
