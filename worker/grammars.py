"""What outputs must match, compiled beside the steps and followed token by token.

Owns the cache of compiled grammars, the thread that compiles, and the state of each row that is held to one. That
state is a pure function of the row's output tokens, so a branch that comes back after preemption, or on another
worker, is held to what it would have been. The languages themselves are the backends' (`grammar_xgrammar.py`,
`grammar_llguidance.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.protos.errors import InvalidRequestError, OctavoError, OverloadedError, RequestFailedError
from octavo.protos.structured_output import PARAM, StructuredOutput
from octavo.protos.types import Int32Array
from octavo.worker.config import GUIDED_BACKENDS
from octavo.worker.vocabulary import Vocabulary

COMPILED_MAX = 256
"""Compiled grammars kept, the last used ones."""
WAITING_MAX = 64
"""Grammars that wait to be compiled; one more is refused."""
COMPILE_SECONDS_MAX = 20.0
"""A step waits no longer for a grammar that it needs. None waits at all where requests come through a front door,
which has every worker compile first."""
_WORD_BITS = 32


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    def accept(self, token: int) -> bool:
        """Go on with `token`; False if it may not come here."""
        ...

    def fill(self, words: Int32Array, index: int) -> None:
        """Write into `words[index]`, [W] int32, one bit a token, lowest first: whether it may come next."""
        ...

    def fork(self) -> Matcher:
        """A twin that goes its own way."""
        ...


Compiled = Callable[[], Matcher]
"""Gives a matcher at the start of an output."""


class GrammarBackend(Protocol):
    def compile(self, wanted: StructuredOutput) -> Compiled:
        """Raises `InvalidRequestError` saying what is wrong with it. Releases the GIL for what takes long."""
        ...


class Grammars:
    """Compiled grammars of one model. Thread-safe. Nothing is imported or read before the first is asked for."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], backend: str) -> None:
        """`backend`: one of `GUIDED_BACKENDS`."""
        assert backend in GUIDED_BACKENDS
        self._read_vocabulary = read_vocabulary
        self._name = backend
        self._backend: GrammarBackend | None = None
        self._compiled: OrderedDict[StructuredOutput, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")

    def compile(self, wanted: StructuredOutput) -> Future[Compiled]:
        """Begin, unless it is known. The future raises what is wrong with `wanted`, as an `OctavoError`."""
        with self._lock:
            future = self._compiled.get(wanted)
            if future is not None:
                self._compiled.move_to_end(wanted)
                return future
            waiting = sum(not future.done() for future in self._compiled.values())
            if waiting >= WAITING_MAX:
                raise OverloadedError(f"{waiting} grammars wait to be compiled, which is the limit")
            future = self._compiled[wanted] = self._thread.submit(self._compile, wanted)
            while len(self._compiled) > COMPILED_MAX:
                # Rows that follow it keep what they have.
                self._compiled.popitem(last=False)
            return future

    def start(self, wanted: StructuredOutput, outputs: Sequence[int]) -> GrammarRow:
        """Of a branch that has `outputs` so far."""
        try:
            compiled = self.compile(wanted)
        except OctavoError as error:
            compiled = Future()
            compiled.set_exception(error)
        return GrammarRow(compiled, list(outputs))

    def _compile(self, wanted: StructuredOutput) -> Compiled:
        try:
            if self._backend is None:
                self._backend = _make_backend(self._name, self._read_vocabulary())
            return self._backend.compile(wanted)
        except OctavoError:
            raise
        except ImportError as error:
            raise InvalidRequestError(
                f"structured output needs a package that is not installed here: {error}", param=PARAM
            ) from error
        except Exception as error:  # compilers raise whatever they like for what they cannot read
            raise InvalidRequestError(
                f"not a {wanted.kind.value} that works here: {error}", param=PARAM
            ) from error


def _make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    if name == "llguidance":
        from octavo.worker.grammar_llguidance import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from octavo.worker.grammar_xgrammar import XGrammarBackend

    return XGrammarBackend(vocabulary)


class GrammarRow:
    """One branch's way through its grammar. Tokens are only noted until a mask is asked for."""

    __slots__ = ("_compiled", "_matcher", "_tokens")

    def __init__(self, compiled: Future[Compiled], tokens: list[int], matcher: Matcher | None = None) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._tokens = tokens
        """Sampled, and not yet accepted."""

    def add(self, token: int) -> None:
        self._tokens.append(token)

    def fork(self) -> GrammarRow:
        """An independent twin for a child branch."""
        matcher = None if self._matcher is None else self._matcher.fork()
        return GrammarRow(self._compiled, list(self._tokens), matcher)

    def fill(self, words: Int32Array, index: int) -> None:
        """Write what may come next into `words[index]`. Waits for the grammar. Raises `OctavoError`."""
        if self._matcher is None:
            try:
                self._matcher = self._compiled.result(COMPILE_SECONDS_MAX)()
            except FutureTimeoutError:
                raise RequestFailedError(
                    f"the grammar was not compiled within {COMPILE_SECONDS_MAX:g} s"
                ) from None
        for token in self._tokens:
            if not self._matcher.accept(token):
                raise RequestFailedError(f"the output left its grammar with token {token}")
        self._tokens.clear()
        self._matcher.fill(words, index)


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """What the grammars of some samples allow."""

    samples: npt.NDArray[np.int64]
    """[M] indices of samples, rising."""
    words: Int32Array
    """[M, ceil(V / 32)] one bit a token, lowest first."""
    errors: dict[int, str] = field(default_factory=dict)
    """Samples whose grammar failed, whose words are 0."""

    @classmethod
    def collect(cls, rows: dict[int, GrammarRow], vocab_size: int) -> TokenMasks:
        """`rows` by index of the sample, in rising order."""
        words = np.zeros((len(rows), -(-vocab_size // _WORD_BITS)), np.int32)
        errors = {}
        for index, (sample, row) in enumerate(rows.items()):
            try:
                row.fill(words, index)
            except OctavoError as error:
                words[index] = 0
                errors[sample] = error.message
        return cls(np.fromiter(rows, np.int64, len(rows)), words, errors)
