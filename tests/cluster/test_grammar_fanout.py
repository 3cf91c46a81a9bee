"""Grammars are made ready on every worker before a request has them: whichever takes it, or takes it over, has it."""

import asyncio
from concurrent.futures import Future

import pytest

from octavo.protos.errors import InvalidRequestError, OverloadedError, UnavailableError
from octavo.protos.structured_output import StructuredOutput

from .fake_cluster import Cluster
from .support import collect, expected, make_request, run, until

WANTED = StructuredOutput.regex("a+")


class Compiling(Cluster):
    """Workers note what they are asked to compile; `refusals` by worker. Those that are asked while `held` is a list
    have not compiled before the future that they leave there has a result."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = []
        self.refusals = {}
        self.held = None

    def make_executor(self, worker_id):
        executor = super().make_executor(worker_id)

        def compile_grammar(wanted):
            self.asked.append((worker_id, wanted))
            future = Future()
            if self.held is not None:
                self.held.append(future)
            elif worker_id in self.refusals:
                future.set_exception(self.refusals[worker_id])
            else:
                future.set_result(None)
            return future

        executor.compile_grammar = compile_grammar
        return executor


def test_every_worker_is_asked_and_one_that_cannot_does_not_matter():
    async def test():
        async with Compiling(3) as cluster:
            backend = await cluster.backend()
            await backend.compile_grammar(WANTED)
            assert sorted(cluster.asked) == [(f"worker-{number}", WANTED) for number in range(3)]
            cluster.refusals["worker-1"] = OverloadedError("too many wait")
            await backend.compile_grammar(WANTED)
            await cluster.kill_worker("worker-0")
            await until(lambda: not cluster.core._slots["worker-0"].serving)
            await backend.compile_grammar(WANTED)

    run(test())


def test_what_is_wrong_with_it_is_told_with_its_field():
    async def test():
        async with Compiling(2) as cluster:
            backend = await cluster.backend()
            cluster.refusals["worker-1"] = InvalidRequestError("no such thing", param="structured_output")
            with pytest.raises(InvalidRequestError, match="no such thing") as caught:
                await backend.compile_grammar(WANTED)
            assert caught.value.param == "structured_output"

    run(test())


def test_workers_that_all_cannot_say_why_and_none_at_all_is_unavailable():
    async def test():
        async with Compiling(1) as cluster:
            backend = await cluster.backend()
            cluster.refusals["worker-0"] = OverloadedError("too many wait")
            with pytest.raises(OverloadedError, match="too many wait"):
                await backend.compile_grammar(WANTED)
            await cluster.kill_worker("worker-0")
            await until(lambda: not cluster.core._slots["worker-0"].serving)
            with pytest.raises(UnavailableError):
                await backend.compile_grammar(WANTED)

    run(test())


def test_a_request_that_meets_a_new_worker_waits_for_its_grammar_and_the_others_do_not():
    async def test():
        async with Compiling(2, step_seconds=0.01) as cluster:
            backend = await cluster.backend()
            await backend.compile_grammar(WANTED)
            held, free = (
                make_request("held", max_tokens=60, structured_output=WANTED),
                make_request("free", max_tokens=60),
            )
            calls = [asyncio.create_task(collect(backend, request)) for request in (held, free)]
            await until(lambda: len(list(cluster.core._requests)) == 2)
            cluster.held = []
            for worker_id in cluster.worker_ids:
                await cluster.kill_worker(worker_id)
            await until(lambda: not any(slot.serving for slot in cluster.core._slots.values()))
            for worker_id in cluster.worker_ids:
                await cluster.start_worker(worker_id)
            assert await calls[1] == {0: expected(free)}
            assert len(cluster.held) == 2
            assert cluster.core.stats()["without_worker"] == 1
            # One worker that has it is enough.
            cluster.held[1].set_result(None)
            assert await calls[0] == {0: expected(held)}
            cluster.held[0].set_result(None)
            await cluster.idle()

    run(test())


def test_one_that_cannot_be_compiled_any_more_is_not_waited_for():
    async def test():
        async with Compiling(1, step_seconds=0.01) as cluster:
            backend = await cluster.backend()
            await backend.compile_grammar(WANTED)
            request = make_request("a", max_tokens=60, structured_output=WANTED)
            call = asyncio.create_task(collect(backend, request))
            await until(lambda: len(list(cluster.core._requests)) == 1)
            cluster.refusals["worker-0"] = OverloadedError("too many wait")
            await cluster.kill_worker("worker-0")
            await until(lambda: not cluster.core._slots["worker-0"].serving)
            await cluster.start_worker("worker-0")
            # The worker itself says so of the request, in its place; this one has no grammars at all.
            assert await call == {0: expected(request)}

    run(test())
