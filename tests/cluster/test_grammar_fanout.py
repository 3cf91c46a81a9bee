"""Grammars are made ready on every worker before a request has them: whichever takes it, or takes it over, has it."""

from concurrent.futures import Future

import pytest

from octavo.protos.errors import InvalidRequestError, OverloadedError, UnavailableError
from octavo.protos.structured_output import StructuredOutput

from .fake_cluster import Cluster
from .support import run, until

WANTED = StructuredOutput.regex("a+")


class Compiling(Cluster):
    """Workers note what they are asked to compile; `refusals` by worker."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = []
        self.refusals = {}

    def make_executor(self, worker_id):
        executor = super().make_executor(worker_id)

        def compile_grammar(wanted):
            self.asked.append((worker_id, wanted))
            future = Future()
            if worker_id in self.refusals:
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
