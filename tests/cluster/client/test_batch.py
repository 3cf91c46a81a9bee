"""Batch jobs against a real local HTTP server, in this process and in one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from octavo.cluster.async_client import AsyncClient
from octavo.cluster.batch import run_batch
from octavo.cluster.batch_file import BatchInput, Journal, state_path
from octavo.protos import errors


def line(custom_id: str, prompt: str | None = None, **changes) -> dict:
    record = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": prompt or f"prompt of {custom_id}", "max_tokens": 3},
    }
    return record | changes


def write(path: Path, *records: dict) -> Path:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def results(path: Path) -> list[dict]:
    return [orjson.loads(raw) for raw in path.read_bytes().split(b"\n") if raw]


def run(url: str, source: Path, out: Path, *, overwrite: bool = False, **client_options):
    async def go():
        async with AsyncClient(url, **client_options) as client:
            return await run_batch(source, out, client, overwrite=overwrite)

    return asyncio.run(go())


def start_cli(server_url: str, source: Path, out: Path, *options: str) -> subprocess.Popen:
    command = "from octavo.cluster.cli import main; main()"
    arguments = ["batch", str(source), "-o", str(out), "--url", server_url, "--json", *options]
    return subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        cwd=source.parent,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def wait_for_lines(out: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "the batch does not progress"
        time.sleep(0.005)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", *[line(f"id-{i}") for i in range(20)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_line_is_answered_once_in_openais_shape(server, source, out):
    summary = run(server.url, source, out)
    lines = results(out)
    assert Counter(entry["custom_id"] for entry in lines) == {f"id-{i}": 1 for i in range(20)}
    for entry in lines:
        assert set(entry) == {"id", "custom_id", "response", "error"}
        assert entry["error"] is None
        assert set(entry["response"]) == {"status_code", "request_id", "body"}
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"]
        assert entry["response"]["body"]["choices"][0]["text"] == f"echo:prompt of {entry['custom_id']}"
    assert len({entry["id"] for entry in lines}) == 20
    assert (summary.total, summary.succeeded, summary.failed, summary.remaining) == (20, 20, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (40, 60)


def test_results_are_written_in_order_of_completion(server, tmp_path, out):
    server.delay_seconds = 0.01
    source = write(tmp_path / "in.jsonl", *[line(f"id-{i}") for i in range(6)])
    run(server.url, source, out, max_concurrency=1)
    assert [entry["custom_id"] for entry in results(out)] == [f"id-{i}" for i in range(6)]


def test_a_finished_batch_sends_nothing_again(server, source, out):
    run(server.url, source, out)
    content = out.read_bytes()
    server.reset()
    summary = run(server.url, source, out)
    assert server.bodies == []
    assert out.read_bytes() == content
    assert (summary.resumed, summary.succeeded) == (20, 20)


def test_kill_9_in_mid_run_and_resume(server, source, out):
    server.delay_seconds = 0.03
    process = start_cli(server.url, source, out, "--concurrency", "2")
    wait_for_lines(out, 5)
    process.kill()
    process.communicate()
    finished = {entry["custom_id"] for entry in results(out)}
    assert 5 <= len(finished) < 20

    server.reset()
    process = start_cli(server.url, source, out)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    summary = orjson.loads(stdout)
    assert summary["resumed"] == len(finished)
    assert Counter(entry["custom_id"] for entry in results(out)) == {f"id-{i}": 1 for i in range(20)}
    asked_again = {prompt.removeprefix("prompt of ") for prompt in server.prompts()}
    assert asked_again == {f"id-{i}" for i in range(20)} - finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly_and_tells_so(server, source, out, number):
    server.delay_seconds = 0.05
    process = start_cli(server.url, source, out, "--concurrency", "1")
    wait_for_lines(out, 2)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    summary = orjson.loads(stdout)
    assert summary["stopped"] == "interrupted"
    assert summary["succeeded"] == len(results(out))
    assert summary["remaining"] == 20 - summary["succeeded"] > 0


def test_stop_ends_a_run_of_the_library_and_leaves_signals_alone(server, source, out):
    server.delay_seconds = 0.02
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def go():
        stop = asyncio.Event()
        async with AsyncClient(server.url, max_concurrency=1) as client:
            asyncio.get_running_loop().call_later(0.15, stop.set)
            return await run_batch(source, out, client, stop=stop)

    summary = asyncio.run(go())
    assert summary.stopped == "interrupted"
    assert 0 < summary.remaining < 20
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_torn_last_line_is_answered_again(server, source, out):
    run(server.url, source, out)
    whole = out.read_bytes()
    torn = whole[:-25]
    out.write_bytes(torn)
    lost = orjson.loads(whole.split(b"\n")[-2])["custom_id"]
    server.reset()
    summary = run(server.url, source, out)
    assert server.prompts() == [f"prompt of {lost}"]
    assert summary.resumed == 19
    assert Counter(entry["custom_id"] for entry in results(out)) == {f"id-{i}": 1 for i in range(20)}


def test_a_torn_first_line(server, source, out):
    run(server.url, source, out)
    out.write_bytes(out.read_bytes()[:10])
    assert run(server.url, source, out).resumed == 0
    assert len(results(out)) == 20


def test_another_input_is_refused_and_nothing_is_sent(server, tmp_path, source, out):
    run(server.url, source, out)
    content = out.read_bytes()
    server.reset()
    other = write(tmp_path / "other.jsonl", line("id-0", "another prompt"))
    with pytest.raises(errors.ConfigError, match=r"another input.*--overwrite"):
        run(server.url, other, out)
    assert out.read_bytes() == content
    assert server.bodies == []
    run(server.url, other, out, overwrite=True)
    assert [entry["custom_id"] for entry in results(out)] == ["id-0"]


def test_a_file_that_is_not_ours_is_never_touched(server, source, out):
    out.write_text("my thesis\n")
    with pytest.raises(errors.ConfigError, match="not written by octavo batch"):
        run(server.url, source, out)
    assert out.read_text() == "my thesis\n"
    with pytest.raises(errors.ConfigError, match="is the input"):
        run(server.url, source, source)


@pytest.mark.parametrize("foreign", [b"not json\n", b'{"custom_id": "stranger"}\n', b"\x00\x00\n", b"[]\n"])
def test_foreign_lines_among_the_results_are_refused(server, source, out, foreign):
    run(server.url, source, out)
    out.write_bytes(foreign + out.read_bytes())
    with pytest.raises(errors.ConfigError, match="line 1 is not a result of this batch"):
        run(server.url, source, out)


def test_one_writer_at_a_time(source, out):
    batch = BatchInput.open(source)
    journal = Journal.open(out, batch)
    with pytest.raises(errors.ConfigError, match="another octavo batch"):
        Journal.open(out, batch)
    journal.close()
    Journal.open(out, batch).close()
    batch.close()


def test_state_names_the_input(source, out):
    batch = BatchInput.open(source)
    Journal.open(out, batch).close()
    assert orjson.loads(state_path(out).read_bytes())["input_sha256"] == batch.sha256
    batch.close()


def test_a_refused_line_is_a_result_and_not_repeated(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", line("bad"), line("good"))
    server.fail(400, "x", "too long")
    summary = run(server.url, source, out, max_concurrency=1)
    bad, good = results(out)
    assert (bad["response"]["status_code"], good["response"]["status_code"]) == (400, 200)
    assert bad["response"]["body"]["error"]["message"] == "too long"
    assert (summary.succeeded, summary.failed, summary.stopped) == (1, 1, None)
    again = run(server.url, source, out)
    assert (again.succeeded, again.failed, again.resumed) == (1, 1, 2)


def test_passing_trouble_is_repeated_then_written_as_an_error(server, tmp_path, out, no_waiting):
    source = write(tmp_path / "in.jsonl", line("lucky"), line("unlucky"))
    server.fail(429, "overloaded", retry_after="1")
    server.fail(503, "unavailable")
    run(server.url, source, out, max_concurrency=1)
    assert [entry["response"]["status_code"] for entry in results(out)] == [200, 200]
    assert no_waiting[0] >= 1

    out.unlink()
    for _ in range(3):
        server.fail(503, "worker_lost")
    summary = run(server.url, source, out, max_concurrency=1, max_retries=2)
    assert [entry["response"]["status_code"] for entry in results(out)] == [503, 200]
    assert summary.failed == 1


def test_a_dropped_connection_is_written_as_an_error_when_the_server_is_well(
    server, tmp_path, out, no_waiting
):
    source = write(tmp_path / "in.jsonl", line("a"))
    server.delay_seconds = 0.4
    run(server.url, source, out, timeout=0.05)
    (entry,) = results(out)
    assert entry["response"] is None
    assert entry["error"]["code"] == "timeout"


def test_no_server_stops_the_run_and_leaves_the_lines(source, out, dead_url, server, no_waiting):
    summary = run(dead_url, source, out, max_retries=2)
    assert results(out) == []
    assert dead_url in summary.stopped
    assert summary.remaining == 20
    assert run(server.url, source, out).succeeded == 20


def test_a_draining_server_stops_the_run_and_leaves_the_lines(server, source, out):
    server.ready_status = 503
    server.fail(503, "unavailable", "draining")
    summary = run(server.url, source, out, max_concurrency=1, max_retries=0)
    assert summary.stopped == "draining"
    assert results(out) == []


def test_a_wrong_key_stops_the_run(server, source, out):
    server.fail(401, "invalid_api_key", "wrong key")
    summary = run(server.url, source, out, max_concurrency=1)
    assert summary.stopped == "wrong key"
    assert summary.remaining == 20


def test_a_line_without_a_model_gets_the_servers(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", line("a", body={"prompt": "x"}))
    run(server.url, source, out)
    assert server.bodies[0]["model"] == "fake-model"


def test_d30_a_duplicate_custom_id_fails_validation_with_both_lines(server, tmp_path, out):
    source = write(tmp_path / "in.jsonl", *[line(name) for name in ("a", "twice", "c", "twice", "e")])
    with pytest.raises(
        errors.InvalidRequestError, match="line 4: custom_id 'twice' was already used on line 2"
    ):
        run(server.url, source, out)
    assert server.bodies == []
    assert not out.exists()


def test_d30_two_jobs_may_use_the_same_ids(server, tmp_path):
    files = [
        write(tmp_path / f"in{k}.jsonl", *[line(f"id-{i}", f"job {k} id {i}") for i in range(10)])
        for k in (1, 2)
    ]

    async def both():
        async with AsyncClient(server.url) as client:
            await asyncio.gather(*[run_batch(path, path.with_suffix(".out"), client) for path in files])

    asyncio.run(both())
    for k, path in enumerate(files, start=1):
        answers = {
            e["custom_id"]: e["response"]["body"]["choices"][0]["text"]
            for e in results(path.with_suffix(".out"))
        }
        assert answers == {f"id-{i}": f"echo:job {k} id {i}" for i in range(10)}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (orjson.dumps(line("")), "custom_id is empty"),
        (orjson.dumps(line("  ")), "custom_id is empty"),
        (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id is missing"),
        (orjson.dumps(line("x" * 513)), "longer than 512"),
        (orjson.dumps({"custom_id": 7}), "must be a string"),
        (b'{"custom_id": "x"', "not valid JSON"),
        (
            b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"temperature": NaN}}',
            "not valid",
        ),
        (b"[1]", "must be a JSON object"),
        (orjson.dumps(line("x", method="GET")), "method must be 'POST', got 'GET'"),
        (orjson.dumps(line("x", url="/v1/images")), "url must be .*got '/v1/images'"),
        (orjson.dumps(line("x", body=[])), "body must be a JSON object"),
        (orjson.dumps(line("x", body={"stream": True})), "stream"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_d30_a_bad_line_is_named_and_nothing_runs(server, tmp_path, out, bad, says):
    source = tmp_path / "in.jsonl"
    source.write_bytes(orjson.dumps(line("ok")) + b"\n\n" + bad + b"\n")
    with pytest.raises(errors.InvalidRequestError, match=f"line 3: .*{says}"):
        run(server.url, source, out)
    assert server.bodies == []
    assert not out.exists()


def test_many_problems_are_listed_up_to_a_number(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x\n" * 25)
    with pytest.raises(errors.InvalidRequestError) as caught:
        BatchInput.open(source)
    shown = caught.value.message.split("\n")
    assert len(shown) == 11
    assert shown[-1] == "... and 15 more problems"


def test_files_that_cannot_be_are_named(tmp_path, source):
    with pytest.raises(errors.ConfigError, match=r"missing\.jsonl"):
        BatchInput.open(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(errors.InvalidRequestError, match="no requests"):
        BatchInput.open(tmp_path / "empty.jsonl")
    batch = BatchInput.open(source)
    with pytest.raises(errors.ConfigError, match="cannot write"):
        Journal.open(tmp_path / "no" / "such" / "folder.jsonl", batch)
    with pytest.raises(errors.ConfigError, match="cannot write"):
        Journal.open(tmp_path, batch)
    batch.close()


def test_a_byte_order_mark_a_missing_last_newline_and_raw_line_separators(server, tmp_path, out):
    source = tmp_path / "in.jsonl"
    prompts = ["a\u2028b\u0085c", "second"]
    text = b"\n".join(orjson.dumps(line(f"id-{i}", prompt)) for i, prompt in enumerate(prompts))
    source.write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    run(server.url, source, out, max_concurrency=1)
    assert server.prompts() == prompts


def test_a_file_changed_while_the_batch_runs_stops_it(source):
    batch = BatchInput.open(source)
    last = batch.lines[-1]
    assert batch.body(last)["prompt"] == "prompt of id-19"
    write(source, line("other"))
    with pytest.raises(errors.InvalidRequestError, match=r"was changed .*line 20"):
        batch.body(last)
    batch.close()


def test_a_full_disk_is_an_error_of_ours_and_the_journal_recovers(source, out):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    batch = BatchInput.open(source)
    journal = Journal.open(out, batch)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor)
    os.close(full)
    with pytest.raises(errors.UnavailableError, match="cannot write"):
        journal.append({"custom_id": "id-0", "response": None, "error": {}})
    os.close(journal._descriptor)
    batch.close()


def test_cli_errors_are_one_line_with_an_exit_code(server, tmp_path, source, out, dead_url):
    broken = write(tmp_path / "broken.jsonl", line("x"), line("x"))
    for url, path, code, says in (
        (server.url, broken, 2, b"already used on line 1"),
        (server.url, tmp_path / "none.jsonl", 2, b"none.jsonl"),
        ("localhost:1", source, 2, b"base_url"),
    ):
        process = start_cli(url, path, out)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert says in stderr
        assert stderr.count(b"\n") == 1
        assert orjson.loads(stdout)["error"]["message"]
    process = start_cli(dead_url, source, out, "--max-retries", "0")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    server.fail(400)
    process = start_cli(server.url, source, out)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert orjson.loads(stdout)["failed"] == 1
