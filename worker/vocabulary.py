"""The bytes of every token of a model, as compilers of grammars want them.

Owns which ids a grammar may never give: special tokens, and ids that pad the model's vocabulary. Knows nothing of
grammars.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import tokenizers

from octavo.protos.errors import InvalidRequestError
from octavo.protos.structured_output import PARAM
from octavo.worker.token_bytes import byte_pieces
from octavo.worker.tokenizer_files import read_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` has one entry for each id of the model's vocabulary; b"" stands for an id that is no text."""

    tokens: tuple[bytes, ...]
    eos_token_ids: tuple[int, ...]
    tokenizer: tokenizers.Tokenizer
    """For a compiler that must know how the model itself would write a text."""

    @property
    def size(self) -> int:
        return len(self.tokens)


def read_vocabulary(
    tokenizer_dir: str | os.PathLike[str], vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """Of a model of `vocab_size` ids. Takes tenths of a second for a large one.

    Raises `ModelLoadError`, and `InvalidRequestError` for a model whose outputs nobody can hold to a grammar.
    """
    files = read_tokenizer(tokenizer_dir)
    pieces = byte_pieces(files.tokenizer)
    if pieces is None or not eos_token_ids:
        why = (
            "has no end-of-sequence token"
            if pieces is not None
            else "has a tokenizer without bytes for each token"
        )
        raise InvalidRequestError(f"structured output is impossible: the model {why}", param=PARAM)
    special = files.special_ids | set(eos_token_ids)
    tokens = (b"" if index in special else pieces.of(index) for index in range(vocab_size))
    return Vocabulary(tuple(tokens), eos_token_ids, files.tokenizer)
