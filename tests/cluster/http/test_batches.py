"""/v1/files and /v1/batches through the `openai` package: lines run once, below everything else, across restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.cluster.jobs.runner import JobRunner
from octavo.cluster.openai import multipart
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import OverloadedError, RequestFailedError

from .conftest import MODEL, Api, ScriptedBackend, error_of

ENDPOINT: Any = "/v1/chat/completions"
Scenario = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def line(custom_id: Any, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": f"Hi {custom_id}"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


class World:
    """One folder, and the processes that serve it one after the other."""

    def __init__(self, folder: Path, backend: ScriptedBackend, tokenizer: Tokenizer) -> None:
        self.folder, self.backend, self.tokenizer = folder, backend, tokenizer
        self.lease_seconds = 10.0

    @asynccontextmanager
    async def process(self, *, killed: bool = False, **config: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """A server; `killed` ends it without a word to the store."""
        app = create_app(self.backend, self.tokenizer, HttpConfig(jobs_dir=str(self.folder), **config))
        runner: JobRunner = app.state.jobs
        runner._poll_seconds, runner._lease_seconds = 0.02, self.lease_seconds
        runner.start()
        try:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport) as http:
                yield openai.AsyncOpenAI(
                    base_url="http://octavo/v1", api_key="x", max_retries=0, http_client=http
                )
        finally:
            if killed:
                tasks = [runner._task, *(turn.task for turn in runner._running.values())]
                runner._task = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            else:
                await runner.close()

    def run(self, scenario: Scenario, **config: Any) -> Any:
        async def go() -> Any:
            async with self.process(**config) as client:
                return await asyncio.wait_for(scenario(client), 20)

        return asyncio.run(go())


@pytest.fixture
def world(tmp_path: Path, backend: ScriptedBackend, tokenizer: Tokenizer) -> World:
    return World(tmp_path / "jobs", backend, tokenizer)


async def submit(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    given = {"endpoint": ENDPOINT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **given)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.01)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


def test_files(world: World) -> None:
    content = bytes(range(256)) * 5000 + b"\r\n--not a boundary\r\n"

    async def scenario(client: openai.AsyncOpenAI) -> None:
        made = [await client.files.create(file=(f"{i}.jsonl", content), purpose="batch") for i in range(3)]
        assert (made[0].bytes, made[0].filename, made[0].purpose) == (len(content), "0.jsonl", "batch")
        assert (await client.files.content(made[0].id)).content == content
        assert [file.id async for file in client.files.list(limit=2)] == [file.id for file in reversed(made)]
        assert (await client.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made[0].id)
        for purpose, size, message in (("assistants", 1, "purpose"), ("batch", 2 * 10**6, "larger than")):
            with pytest.raises(openai.APIStatusError, match=message):
                await client.files.create(file=("refused", b"x" * size), purpose=purpose)  # type: ignore[arg-type]
        assert len(list((world.folder / "files").iterdir())) == 2, "nothing of a refused upload stays"

    world.run(scenario, file_bytes_max=len(content) + 512)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_forms_in_pieces(tmp_path: Path, size: int) -> None:
    content = b"\r\n--bound\r-\r\n--boundar\r\n" * 3
    form = (
        b'preamble\r\n--boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--boundary\r\ncontent-type: x/y\r\ncontent-disposition: form-data; name="file"; filename="a;b.jsonl"'
        b"\r\n\r\n" + content + b"\r\n--boundary--\r\nepilogue"
    )
    reader = multipart._Reader(b"boundary", tmp_path / "file")
    for at in range(0, len(form), size):
        reader.feed(form[at : at + size])
        reader.write()
    reader.close()
    assert reader.ended
    assert (reader.upload.fields, reader.upload.filename) == ({"purpose": "batch"}, "a;b.jsonl")
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{}", {"content-type": "application/json"}),
        (b"--b\r\nno end", {"content-type": "multipart/form-data; boundary=b"}),
        (b"--b\r\n\r\nx\r\n--b--", {"content-type": "multipart/form-data; boundary=b"}),
        (b"--bXX", {"content-type": "multipart/form-data; boundary=b"}),
        (b"--b--\r\n", {"content-type": "multipart/form-data; boundary=b"}),
    ],
)
def test_forms_that_are_none(
    make_api: Callable[..., Api], tmp_path: Path, content: bytes, headers: dict[str, str]
) -> None:
    error_of(
        make_api(jobs_dir=str(tmp_path)).send("POST", "/v1/files", content=content, headers=headers), 400
    )


def test_each_model_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert ServiceConfig().http_config().jobs_dir == str(tmp_path / "jobs" / "default")
    assert ServiceConfig(model="/a/b c").http_config().jobs_dir == str(tmp_path / "jobs" / "_a_b_c")
    assert ServiceConfig(jobs_dir="there").http_config().jobs_dir == "there"
    assert ServiceConfig(jobs_dir="").http_config().jobs_dir is None


def test_without_a_folder_there_are_neither(api: Api) -> None:
    for path in ("/v1/files", "/v1/batches"):
        assert error_of(api.get(path), 404)["code"] == "jobs_disabled"


def test_a_batch(world: World, backend: ScriptedBackend) -> None:
    lines = [
        line("a"),
        line("b", temperature=9),
        line("c", max_tokens=2, priority=-5, seed=11),
        line("d", model=None, n=2),
    ]

    async def scenario(client: openai.AsyncOpenAI) -> None:
        started = await submit(client, b"\xef\xbb\xbf" + jsonl(*lines) + b"\n", metadata={"who": "me"})
        assert started.status == "validating"
        batch = await ended(client, started.id)
        assert batch.status == "completed"
        assert batch.metadata == {"who": "me"}
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            4,
            3,
            1,
        )
        answers = await results(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == ["a", "c", "d"]
        assert answers[0]["response"]["status_code"] == 200
        assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world!"
        assert answers[0]["error"] is None
        assert len(answers[2]["response"]["body"]["choices"]) == 2
        (refused,) = await results(client, batch.error_file_id)
        assert refused["custom_id"] == "b"
        assert refused["response"]["status_code"] == 400
        assert refused["response"]["body"]["error"]["param"] == "temperature"
        assert [found.id async for found in client.batches.list()] == [batch.id]
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.BadRequestError, match="is completed"):
            await client.batches.cancel(batch.id)

    world.run(scenario)
    assert {request.priority for request in backend.submitted} == {2**31 - 1}, "below everything else"
    assert sorted(request.seed == 11 for request in backend.submitted) == [False, False, True]


@pytest.mark.parametrize(
    ("records", "number", "message"),
    [
        ([line("a"), line("b"), line("a")], 3, "custom_id 'a' was already used on line 1"),
        ([line("a"), line("")], 2, "custom_id is empty"),
        ([{"method": "POST", "url": ENDPOINT, "body": {}}], 1, "custom_id is missing"),
        ([line("a", url="/v1/embeddings")], 1, "url must be /v1/chat/completions"),
        ([line("a", url="/v1/completions")], 1, "url must be /v1/chat/completions"),
        ([line("a", model="other")], 1, "the model 'other' does not exist"),
        ([line("a", stream=True)], 1, "stream"),
        ([], 1, "no requests"),
    ],
)
def test_d30_nothing_of_an_invalid_file_runs(
    world: World, backend: ScriptedBackend, records: list[Any], number: int, message: str
) -> None:
    async def scenario(client: openai.AsyncOpenAI) -> Any:
        return await ended(client, (await submit(client, jsonl(*records))).id)

    batch = world.run(scenario)
    assert batch.status == "failed"
    assert batch.errors.data[0].line == number
    assert message in batch.errors.data[0].message
    assert backend.submitted == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"extra_body": {"input_file_id": "file-none"}}, "no file 'file-none'"),
    ],
)
def test_refused_at_once(world: World, fields: dict[str, Any], message: str) -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match=message):
            await submit(client, jsonl(line("a")), **fields)

    world.run(scenario)


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_loses_and_repeats_no_line(world: World, backend: ScriptedBackend, killed: bool) -> None:
    """Two ends in mid-work, one while answers are half told; then an undisturbed run says the same."""
    world.lease_seconds = 0.2
    content = jsonl(*(line(f"id{number}", temperature=1.0) for number in range(60)))
    # What a line says depends on its seed: a line that is asked again must get the same one.
    backend.answer = lambda request, branch: [*(19556 + int(c, 16) for c in f"{request.seed:016x}"), 2]
    budget = [0]

    async def stall(request: Any, step: int) -> None:
        if step == 5 and budget[0] <= 0:
            await asyncio.Event().wait()
        budget[0] -= step == 5

    backend.before_step = stall

    async def scenario() -> tuple[Any, list[Any], dict[str, Any]]:
        done = 0
        batch_id = None
        kept: dict[str, Any] = {}
        for _ in range(2):
            budget[0] = 17
            async with world.process(killed=killed, batch_lines_in_flight_max=8) as client:
                batch_id = batch_id or (await submit(client, content)).id
                done += 17
                while (await client.batches.retrieve(batch_id)).request_counts.completed < done:
                    await asyncio.sleep(0.01)
            with sqlite3.connect(world.folder / "jobs.sqlite") as db:
                now = dict(db.execute("SELECT custom_id, result FROM lines WHERE state != 0"))
            assert len(now) == done
            assert kept.items() <= now.items(), "an answer that was kept stays as it is"
            kept = now
        budget[0] = 1000
        async with world.process() as client:
            batch = await ended(client, batch_id or "")
            return batch, await results(client, batch.output_file_id), kept

    batch, answers, kept = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert batch.status == "completed"
    assert batch.error_file_id is None
    assert [answer["custom_id"] for answer in answers] == [f"id{number}" for number in range(60)]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert all(json.loads(result) == by_id[custom_id] for custom_id, result in kept.items())
    assert len(backend.submitted) <= 60 + 2 * 8
    seeds: dict[Any, set[int]] = {}
    for request in backend.submitted:
        seeds.setdefault(request.prompt_token_ids.tobytes(), set()).add(request.seed)
    assert all(len(of_line) == 1 for of_line in seeds.values())
    assert len(backend.finished) == 60


def test_cancel_keeps_what_is_answered(world: World, backend: ScriptedBackend) -> None:
    async def stall(request: Any, step: int) -> None:
        if len(backend.finished) >= 3:
            await asyncio.Event().wait()

    backend.before_step = stall

    async def scenario(client: openai.AsyncOpenAI) -> None:
        batch = await submit(client, jsonl(*(line(f"id{number}") for number in range(10))))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 3:
            await asyncio.sleep(0.01)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        answers, left = [await results(client, file) for file in (batch.output_file_id, batch.error_file_id)]
        # Up to two more were under way when the third had ended.
        assert 3 <= len(answers) <= 5
        assert len(answers) + len(left) == 10
        assert {entry["error"]["code"] for entry in left} == {"batch_cancelled"}
        assert len({entry["custom_id"] for entry in answers + left}) == 10
        assert backend.num_running == 0

    world.run(scenario, batch_lines_in_flight_max=3)


def test_expiry(world: World, backend: ScriptedBackend) -> None:
    async def stall(request: Any, step: int) -> None:
        await asyncio.Event().wait()

    backend.before_step = stall

    async def scenario(client: openai.AsyncOpenAI) -> None:
        batch = await submit(client, jsonl(line("a")), completion_window="1m")
        while not backend.submitted:
            await asyncio.sleep(0.01)
        with sqlite3.connect(world.folder / "jobs.sqlite") as db:
            db.execute("UPDATE batches SET expires_at = 1")
        batch = await ended(client, batch.id)
        assert batch.status == "expired"
        (entry,) = await results(client, batch.error_file_id)
        assert entry["error"]["code"] == "batch_expired"
        assert entry["response"] is None

    world.run(scenario)


def test_a_full_server_is_waited_for_and_a_failing_line_is_not(
    world: World, backend: ScriptedBackend
) -> None:
    tries: dict[str, int] = {}

    async def fail(request: Any, step: int) -> None:
        text = backend.tokenizer.decode(request.prompt_token_ids.tolist(), False)
        name = next(name for name in ("busy", "broken", "fine") if f"Hi {name}" in text)
        tries[name] = tries.get(name, 0) + (step == 0)
        if name == "busy" and tries[name] < 3:
            raise OverloadedError("full")
        if name == "broken":
            raise RequestFailedError("it breaks")

    backend.before_step = fail

    async def scenario(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, (await submit(client, jsonl(*map(line, ("busy", "broken", "fine"))))).id)
        answers, refused = [await results(client, f) for f in (batch.output_file_id, batch.error_file_id)]
        assert [answer["custom_id"] for answer in answers] == ["busy", "fine"]
        assert [entry["response"]["status_code"] for entry in refused] == [500]

    world.run(scenario)
    assert tries == {"busy": 3, "broken": 3, "fine": 1}


def test_news_at_the_moment_of_closing_does_not_keep_the_runner_alive(world: World) -> None:
    """A batch that ends while the process does: `asyncio.wait_for` of Python 3.11 would lose the cancellation."""

    async def scenario() -> None:
        app = create_app(world.backend, world.tokenizer, HttpConfig(jobs_dir=str(world.folder)))
        runner: JobRunner = app.state.jobs
        runner.start()
        await asyncio.sleep(0.05)
        runner.wake()
        await runner.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_all_endpoints_and_two_processes_of_one_folder(world: World, backend: ScriptedBackend) -> None:
    async def scenario() -> None:
        async with world.process() as one, world.process() as other:
            batches = []
            for url, fields in (("/v1/completions", {"prompt": "Hi"}), ("/v1/responses", {"input": "Hi"})):
                records = [
                    {"custom_id": str(i), "method": "POST", "url": url, "body": fields} for i in range(20)
                ]
                batches.append(await submit(one, jsonl(*records), endpoint=url))
            # Case D30: the same ids in two batches at once, and no answer in the wrong one.
            for batch, kind in zip(batches, ("text_completion", "response"), strict=True):
                found = await ended(other, batch.id)
                assert found.status == "completed"
                answers = await results(one, found.output_file_id)
                assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(20)]
                assert {answer["response"]["body"]["object"] for answer in answers} == {kind}

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert len(backend.submitted) == 40
