"""The reference answers of tests/data/golden.json, and rule R1, by which an answer is compared with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
NEAR_TIE_NATS = 1e-3
"""Rule R1: below this top-1 minus top-2 margin either token is right."""


@dataclass(frozen=True)
class Prompt:
    """One line of prompts.jsonl. `messages` is present where the prompt is a rendered conversation."""

    id: str
    kind: str
    """"chat", "code" or "text"."""
    prompt: str
    messages: tuple[dict[str, str], ...] = ()


class Golden:
    """Prompts by index, and what Hugging Face `generate` answers to them: greedy, float32, EOS not obeyed."""

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return tuple(
            Prompt(**{**fields, "messages": tuple(fields.get("messages", ()))})
            for fields in map(json.loads, lines)
        )

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        return json.loads((DATA / "golden.json").read_text(encoding="utf-8"))["entries"]

    @cached_property
    def long_context(self) -> dict[str, Any]:
        """One answer of 64 ids to 3,000: prompt_ids, token_ids, margins, top_ids and top_logits [64][16]."""
        return json.loads((DATA / "golden_long.json").read_text(encoding="utf-8"))["entries"][0]

    def reference(self, prompt_index: int) -> list[int]:
        """The reference ids: 48 of them, or 100 for the first ten prompts."""
        return self.entries[prompt_index]["token_ids"]

    def assert_same_prompt(self, prompt_index: int, prompt_ids: Sequence[int]) -> None:
        """The prompt was tokenised as it was for the reference; otherwise comparing answers means nothing."""
        entry = self.entries[prompt_index]
        digest = hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).hexdigest()
        assert len(prompt_ids) == entry["num_prompt_tokens"], (
            f"{entry['id']}: {len(prompt_ids)} prompt tokens"
        )
        assert digest == entry["prompt_ids_sha256"], f"{entry['id']}: other prompt ids than the reference's"

    def assert_equals_reference(self, prompt_index: int, token_ids: Sequence[int]) -> None:
        """Rule R1: equal to the reference as far as both go, or first different at a near tie of the reference."""
        assert_equals_entry(self.entries[prompt_index], token_ids)


def assert_equals_entry(entry: Mapping[str, Any], token_ids: Sequence[int]) -> None:
    """Rule R1 against one entry: its `id`, `token_ids` and `margins`."""
    assert len(token_ids) > 0, f"{entry['id']}: no tokens"
    pairs = zip(entry["token_ids"], token_ids, entry["margins"], strict=False)
    for position, (expected, got, margin) in enumerate(pairs):
        if expected != got:
            assert margin < NEAR_TIE_NATS, (
                f"{entry['id']}: token {position} is {got}, reference {expected} by a margin of {margin} nats; "
                f"got {list(token_ids)}, reference {entry['token_ids']}"
            )
            return
