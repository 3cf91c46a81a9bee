"""A model's tokenizer as its folder describes it, without what some training run left in the files.

Owns the reading of tokenizer.json and what stands beside it, for the front door and for workers alike: both must see
one vocabulary. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.protos.errors import ModelLoadError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What `read_tokenizer` found."""

    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Named special tokens, "bos_token" and so on."""
    config: dict[str, Any]
    """tokenizer_config.json."""

    @property
    def special_ids(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)


def read_tokenizer(folder: str | os.PathLike[str]) -> TokenizerFiles:
    """Reads `folder`. Raises `ModelLoadError` naming the path."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist; Octavo needs a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} is not a tokenizer: {error}") from error
    # Files may carry the padding and truncation of somebody's training run.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = read_json_object(path.parent / "tokenizer_config.json")
    special_tokens = _special_tokens(path.parent, config)
    _add_missing_tokens(tokenizer, config, special_tokens)
    # What stands around a text (BOS, EOS) is tokenizer.json's to say; where that file exists, the add_bos_token
    # and add_eos_token of the configuration are remains of the slow tokenizer, and transformers skips them too.
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerFiles(tokenizer, special_tokens, config)


def read_json_object(path: Path) -> dict[str, Any]:
    """What a file holds; {} where there is none. Raises `ModelLoadError` naming it."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    """The text of a special token, which the files give as a string or as a mapping with flags."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = dict(config)
    if "added_tokens_decoder" not in config:
        found.update(read_json_object(folder / "special_tokens_map.json"))
    return {name: text for name in SPECIAL_TOKEN_NAMES if (text := _content(found.get(name))) is not None}


def _add_missing_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that only the configuration names, and the special flag of those it calls special."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, flags in sorted(listed.items(), key=lambda item: int(item[0])):
        if flags["content"] not in known:
            tokenizer.add_tokens([AddedToken(**flags)])
            known[flags["content"]] = AddedToken(**flags)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*special_tokens.values(), *map(_content, extra.values() if isinstance(extra, dict) else extra)]
    for text in named:
        if text is not None and not (text in known and known[text].special):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
