"""Text that comes in pieces equals the text of the whole, whatever the pieces (cases D11 and D12)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.cluster.detokenizer import BranchText, IncrementalDetokenizer, StopStringChecker
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.types import SamplingParams

KNEELING = [10813, 117, 232]
"""U+1F9CE, one character of three tokens."""
P = 64

IDS = st.lists(st.one_of(st.sampled_from([*KNEELING, P, 2]), st.integers(0, 49151)), max_size=40)
"""Random ids, rich in parts of characters and special tokens."""


def test_d12_a_character_of_three_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in KNEELING] == ["", "", "\U0001f9ce"]
    assert detokenizer.finish() == ""


def test_d12_a_cut_character_is_told_once(tokenizer: Tokenizer) -> None:
    for count in range(1, 10):
        ids = (KNEELING * 3)[:count]
        detokenizer = IncrementalDetokenizer(tokenizer)
        deltas = [detokenizer.push([token]) for token in ids]
        assert not any("\ufffd" in delta for delta in deltas)
        last = detokenizer.finish()
        assert last == ("" if count % 3 == 0 else "\ufffd")
        assert "".join(deltas) + last == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=IDS, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_d12_joined_deltas_are_the_decoding_of_the_whole(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    deltas = [detokenizer.push(piece) for piece in _cut(ids, cuts)] + [detokenizer.finish()]
    assert "".join(deltas) == tokenizer.decode(ids, skip)
    # The library's own decoder agrees, so nothing was defined away.
    assert tokenizer.decode(ids, skip) == tokenizer._tokenizer.decode(ids, skip_special_tokens=skip)


def test_d12_without_a_byte_map_the_window_gives_the_same(tokenizer: Tokenizer) -> None:
    """The look-back method, for decoders such as WordPiece, on text where both methods can run."""
    ids = tokenizer.encode("Hello \U0001f9ce\U0001f9ce wide 日本語 world" * 3)
    plain = _WithoutPieces(tokenizer)
    detokenizer = IncrementalDetokenizer(plain)  # type: ignore[arg-type]
    deltas = [detokenizer.push([token]) for token in ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids)
    cut = IncrementalDetokenizer(plain)  # type: ignore[arg-type]
    assert cut.push(KNEELING[:2]) + cut.finish() == "\ufffd"


class _WithoutPieces:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = None
        self.decode = tokenizer._tokenizer.decode


def _cut(ids: Sequence[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut <= len(ids))})
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


# ---- stop strings


def _first_match(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """The slow oracle: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


SMALL_TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=SMALL_TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=10), include=st.booleans())
@example(text="aaab", stops=["aab"], cuts=[2], include=False)
@example(text="abcabd", stops=["bd", "abd"], cuts=[1, 3, 5], include=False)
def test_d11_stop_strings_match_across_any_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    checker = StopStringChecker(stops, include)
    shown, stopped = "", False
    expected, must_stop = _first_match(text, stops, include)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    for a, b in itertools.pairwise(edges):
        new, stopped = checker.push(text[a:b])
        shown += new
        assert expected.startswith(shown), "text was shown that a stop string takes back"
        if stopped:
            break
    if not stopped:
        shown += checker.finish()
    assert (shown, stopped) == (expected, must_stop)


def test_d11_nothing_is_held_back_without_need() -> None:
    checker = StopStringChecker(["abcd"])
    assert checker.push("xyz") == ("xyz", False)
    assert checker.push("xab") == ("x", False)
    assert checker.push("cx") == ("abcx", False)
    assert checker.push("ab") == ("", False)
    assert checker.finish() == "ab"


def test_d11_long_stop_strings_cost_no_more(tokenizer: Tokenizer) -> None:
    """A string of 1,024 characters that nearly matches, again and again, is found all the same."""
    stop = "a" * 1023 + "b"
    checker = StopStringChecker([stop])
    shown = "".join(checker.push("a")[0] for _ in range(5000))
    assert shown == "a" * (5000 - 1023)
    assert checker.push("b") == ("", True)


# ---- both together


def test_d11_forced_token_and_stop(tokenizer: Tokenizer) -> None:
    text = BranchText(tokenizer, SamplingParams(stop=("PPP",), max_tokens=10))
    seen = [text.push([P], finished=False) for _ in range(4)]
    assert seen == [("", False), ("", False), ("", True), ("", True)]
    assert text.num_tokens == 3


def test_d11_the_token_count_does_not_depend_on_the_deltas(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five six")
    for size in (1, 2, 3, len(ids)):
        text = BranchText(tokenizer, SamplingParams(stop=("thr",)))
        shown = ""
        for start in range(0, len(ids), size):
            new, stopped = text.push(ids[start : start + size], finished=start + size >= len(ids))
            shown += new
        assert (shown, stopped, text.num_tokens) == ("one two ", True, 3)


def test_d11_the_stop_string_is_kept_when_asked(tokenizer: Tokenizer) -> None:
    text = BranchText(tokenizer, SamplingParams(stop=("thr",), include_stop_str_in_output=True))
    assert text.push(tokenizer.encode("one two three four"), True) == ("one two thr", True)


def test_stop_tokens_are_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    for include, shown in ((False, "PP"), (True, "PPP")):
        params = SamplingParams(stop_token_ids=(P,), include_stop_str_in_output=include)
        text = BranchText(tokenizer, params)
        assert text.push([P, P, P], True, stop_token=True) == (shown, False)
        assert text.num_tokens == 3


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    text = BranchText(tokenizer, SamplingParams(stop=("P",), min_tokens=3))
    assert [text.push([P]) for _ in range(3)] == [("P", False), ("P", False), ("", True)]


@settings(max_examples=200, deadline=None)
@given(
    ids=IDS,
    cuts=st.lists(st.integers(0, 40), max_size=8),
    where=st.tuples(st.integers(0, 60), st.integers(1, 6)),
)
def test_d11_a_stop_cut_from_the_answer(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], where: tuple[int, int]
) -> None:
    whole = tokenizer.decode(ids)
    stop = whole[where[0] : where[0] + where[1]]
    if not stop:
        return
    expected = whole[: whole.index(stop)]
    for pieces in (_cut(ids, cuts), [[token] for token in ids], [ids]):
        text = BranchText(tokenizer, SamplingParams(stop=(stop,)))
        shown = ""
        for index, piece in enumerate(pieces):
            shown += text.push(piece, finished=index == len(pieces) - 1)[0]
        assert text.stopped
        assert shown == expected


@pytest.mark.parametrize("finished", [True, False])
def test_an_empty_push_changes_nothing(tokenizer: Tokenizer, finished: bool) -> None:
    text = BranchText(tokenizer, SamplingParams())
    assert text.push([], finished) == ("", False)
    assert text.num_tokens == 0
