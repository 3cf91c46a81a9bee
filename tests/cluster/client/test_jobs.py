"""`Client.files`, `Client.batches` and `octavo batch submit|status|results|cancel`, over HTTP on a port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvicorn
from typer.testing import CliRunner

from octavo.cluster.cli.app import app as command
from octavo.cluster.client import Client
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import errors
from octavo.worker.default_model import default_model_dir

from ..http.conftest import MODEL, ScriptedBackend

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


class JobServer:
    """The HTTP app with its runner, on a port and in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(default_model_dir())
        self.backend = ScriptedBackend(self.tokenizer)
        app = create_app(self.backend, self.tokenizer, HttpConfig(jobs_dir=str(folder)))
        runner = app.state.jobs
        runner._poll_seconds = 0.02

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> Any:
            runner.start()
            yield
            await runner.close()

        app.router.lifespan_context = lifespan
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)

    def start(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.tokenizer.close()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    server = JobServer(tmp_path_factory.mktemp("jobs"))
    server.url = server.start()
    yield server
    server.stop()


@pytest.fixture
def client(jobs: JobServer) -> Iterator[Client]:
    with Client(jobs.url) as found:
        yield found


@pytest.fixture
def octavo(jobs: JobServer) -> Any:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(command, [*arguments], env={"OCTAVO_URL": jobs.url})

    return run


def write(path: Path, *custom_ids: str, url: str = CHAT, **body: Any) -> Path:
    lines = []
    for custom_id in custom_ids:
        asked = (
            {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {"input": custom_id}
        )
        lines.append({"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_of_requests_is_answered_and_fetched(client, tmp_path):
    source = write(tmp_path / "in.jsonl", "a", "b", "c")
    seen = []
    made = client.batches.create(source, completion_window="2h", metadata={"who": "me"})
    batch = client.batches.wait(made.id, timeout=20, poll_seconds=0.01, on_change=seen.append)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 3, 0)
    assert batch.ended
    assert batch.fields["metadata"] == {"who": "me"}
    assert seen[-1] == batch
    records = client.batches.results(batch.id)
    assert [record["custom_id"] for record in records] == ["a", "b", "c"]
    assert all(record["response"]["body"]["model"] == MODEL for record in records)
    assert client.batches.retrieve(batch.id) == batch
    assert [one.id for one in client.batches.list(1)] == [batch.id]
    file = client.files.retrieve(batch.input_file_id)
    assert (file.filename, file.num_bytes) == ("in.jsonl", source.stat().st_size)
    assert client.files.content(file.id) == source.read_bytes()
    again = client.batches.create(file.id, endpoint=CHAT)
    client.batches.wait(again.id, timeout=20, poll_seconds=0.01)
    client.files.delete(file.id)
    assert file.id not in [one.id for one in client.files.list()]
    with pytest.raises(errors.NotFoundError):
        client.files.retrieve(file.id)


def test_refused_lines_come_after_the_answers(client, tmp_path):
    source = write(tmp_path / "in.jsonl", "good", "bad")
    text = source.read_text().replace('"content": "bad"}]', '"content": "bad"}], "temperature": 9')
    source.write_text(text)
    batch = client.batches.wait(client.batches.create(source).id, timeout=20, poll_seconds=0.01)
    records = {
        record["custom_id"]: record["response"]["status_code"] for record in client.batches.results(batch.id)
    }
    assert records == {"good": 200, "bad": 400}


def test_what_is_wrong_is_told_before_anything_is_uploaded(client, tmp_path):
    before = len(client.files.list())
    with pytest.raises(errors.InvalidRequestError, match=r"line 2: custom_id 'a' was already used on line 1"):
        client.batches.create(write(tmp_path / "twice.jsonl", "a", "a"))
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(
        write(tmp_path / "x", "a").read_text() + write(tmp_path / "y", "b", url=RESPONSES).read_text()
    )
    with pytest.raises(errors.InvalidRequestError, match="a batch has one endpoint"):
        client.batches.create(mixed)
    with pytest.raises(errors.ConfigError, match="gone"):
        client.batches.create(tmp_path / "gone")
    with pytest.raises(errors.InvalidRequestError, match="endpoint"):
        client.batches.create("file-1")
    with pytest.raises(errors.NotFoundError):
        client.batches.retrieve("batch_../../x")
    assert len(client.files.list()) == before
    # What only the server can know fails there, with the line.
    batch = client.batches.create(write(tmp_path / "model.jsonl", "a", model="other"))
    batch = client.batches.wait(batch.id, timeout=20, poll_seconds=0.01)
    assert batch.status == "failed"
    with pytest.raises(errors.InvalidRequestError, match=r"line 1: the model 'other'"):
        client.batches.results(batch.id)


def test_cancel_and_a_wait_that_is_too_short(client, jobs, tmp_path, monkeypatch):
    slow = asyncio.Event()

    async def hang(request: Any) -> Any:
        await slow.wait()
        yield

    monkeypatch.setattr(jobs.backend, "submit", hang)
    batch = client.batches.create(write(tmp_path / "in.jsonl", "a", "b"))
    with pytest.raises(errors.UnavailableError, match="0 of 2 lines") as caught:
        client.batches.wait(batch.id, timeout=0.2, poll_seconds=0.05)
    assert caught.value.code == "timeout"
    with pytest.raises(errors.InvalidRequestError, match="at the end"):
        client.batches.results(batch.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = client.batches.wait(batch.id, timeout=20, poll_seconds=0.01)
    assert batch.status == "cancelled"
    assert [record["error"]["code"] for record in client.batches.results(batch.id)] == ["batch_cancelled"] * 2
    with pytest.raises(errors.InvalidRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_the_commands(octavo, tmp_path):
    source, out = write(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl"
    done = octavo("batch", "submit", str(source), "--metadata", "who=me", "--wait")
    assert done.exit_code == 0, done.output
    batch_id = done.stdout.strip()
    assert batch_id.startswith("batch_")
    assert "2 of 2 succeeded" in done.stderr
    assert "completed" in octavo("batch", "status", batch_id).stdout
    listed = orjson.loads(octavo("batch", "status", "--limit", "1", "--json").stdout)["batches"]
    assert [one["id"] for one in listed] == [batch_id]
    assert listed[0]["metadata"] == {"who": "me"}
    assert octavo("batch", "results", batch_id, "-o", str(out)).exit_code == 0
    assert [orjson.loads(line)["custom_id"] for line in out.read_bytes().splitlines()] == ["a", "b"]
    assert octavo("batch", "results", batch_id).stdout.encode() == out.read_bytes()
    done = octavo("batch", "results", batch_id, "--json", "-o", str(out))
    assert orjson.loads(done.stdout)["status"] == "completed"
    assert octavo("batch", "results", batch_id, "--json").exit_code == 2
    assert octavo("batch", "cancel", batch_id).exit_code == 2
    assert octavo("batch", "status", "batch_none", "--json").exit_code == 1
    assert octavo("batch", "submit", str(tmp_path / "gone")).exit_code == 2
    bad = write(tmp_path / "bad.jsonl", "a", model="other")
    done = octavo("batch", "submit", str(bad), "--wait")
    assert done.exit_code == 1
    assert "line 1: the model 'other'" in done.stderr
