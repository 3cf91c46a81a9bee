"""How far the greedy answers of two engines are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from drive import Answers, Token

Decode = Callable[[list[int]], str]


def agreement(ours: Answers, theirs: Answers, decode: Decode | None = None) -> dict[str, Any]:
    """Whole greedy answers that are equal, and the share of all that stands before a first difference.

    Tokens are compared by id. Where one side has text only, both sides' text is (`decode` turns ids into it), and
    the share is one of characters.
    """
    greedy = [name for name in ours if name in theirs and not name.startswith("w4/")]
    pairs = [_comparable(ours[name], theirs[name], decode) for name in greedy]
    equal = sum(a == b for a, b in pairs)
    shared = sum(_common_prefix(a, b) for a, b in pairs)
    total = sum(len(a) for a, _ in pairs)
    return {
        "equal_answers": f"{equal}/{len(pairs)}",
        "share_before_difference": round(shared / max(total, 1), 3),
    }


def _comparable(
    ours: list[Token], theirs: list[Token], decode: Decode | None
) -> tuple[Sequence[Token], Sequence[Token]]:
    if all(isinstance(token, int) for token in (*ours, *theirs)):
        return ours, theirs
    assert decode is not None
    return _text(ours, decode), _text(theirs, decode)


def _text(tokens: list[Token], decode: Decode) -> str:
    pieces = [token for token in tokens if isinstance(token, str)]
    ids = [token for token in tokens if isinstance(token, int)]
    text = "".join(pieces) + (decode(ids) if ids else "")
    return text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character whose end was cut off


def _common_prefix(a: Sequence[Token], b: Sequence[Token]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
