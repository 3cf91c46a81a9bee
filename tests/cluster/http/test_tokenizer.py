"""The tokenizer against its two oracles: `transformers` for ids and prompts, the bytes of UTF-8 for text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError, ModelLoadError

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\ttab \r\n",
    "def f(x):\n    return x ** 2  # 12345.678e-9",
    "Grüße aus Köln, señor! Ça va? ÀÉÎ",
    "日本語とことば。漢字かな交じり文",
    "Привет, мир! שלום",
    "emoji \U0001f9ce\U0001f469‍\U0001f52c ok",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "nul \x00 byte, \u2028 separator, \ufffd replacement",
    "x" * 3000,
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?  "}],
    [
        {"role": "user", "content": "1 < 2 & 'quoted' \"text\"\n"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "日本 \U0001f9ce"},
    ],
]


@pytest.fixture(scope="module")
def oracle(tokenizer: Tokenizer) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(tokenizer.folder)


def test_ids_equal_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle(text)["input_ids"], text
        assert tokenizer.encode(text, False) == oracle(text, add_special_tokens=False)["input_ids"], text


def test_decoding_equals_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
    # Cut characters and ids in no order at all.
    for ids in ([10813], [117, 232], [232, 10813, 117], list(range(17, 600, 7))):
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_d19_rendered_chats_equal_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    for chat in CHATS:
        for generation in (True, False):
            text = tokenizer.render_chat(chat, add_generation_prompt=generation)
            assert text == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
            ids = oracle.apply_chat_template(chat, add_generation_prompt=generation)["input_ids"]
            assert tokenizer.encode(text, False) == ids


def test_facts_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("") == []
    assert tokenizer.encode("\U0001f9ce") == [10813, 117, 232]
    assert tokenizer.token_bytes(10813) + tokenizer.token_bytes(117) + tokenizer.token_bytes(232) == (
        "\U0001f9ce".encode()
    )
    assert tokenizer.token_text(232).startswith("bytes:\\x")
    assert tokenizer.token_text(64) == "P"
    assert tokenizer.token_bytes(49152) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([64, 10**9, 64]) == "PP"


def test_the_shortest_possible_count_is_a_lower_bound(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.fewest_tokens("a b " * 10**6) > 1000


def test_neither_torch_nor_transformers_is_imported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = (
        "import sys, octavo.cluster.openai.app, octavo.cluster.tokenizer as t;"
        f"t.Tokenizer({str(tokenizer.folder)!r}).close();"
        "print([m for m in ('torch', 'transformers', 'ray', 'grpc', 'numba') if m in sys.modules])"
    )
    # Not from the checkout, whose folders have names of their own.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


# ---- other kinds of tokenizers, made small


def _byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-like: pieces with U+2581 for space, and a piece for every byte."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "h", "i", "▁hi", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("h", "i")][:0], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def _save(made: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_byte_fallback_pieces_have_exact_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_save(_byte_fallback(), tmp_path))
    ids = tokenizer.encode("hi \U0001f9ce é", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hi \U0001f9ce é"
    assert tokenizer.continuation(ids) == " hi \U0001f9ce é"
    assert b"".join(map(tokenizer.token_bytes, ids)) == " hi \U0001f9ce é".encode()
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_text(3 + 0xF0) == "bytes:\\xf0"
    tokenizer.close()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
    ids=str,
)
def test_bos_and_eos_follow_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    import transformers

    folder = _save(_byte_fallback(), tmp_path, **config)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    for text in ("hi", "", "</s> hi"):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
        assert tokenizer.encode(text, False) == oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == oracle.decode(
            oracle(text)["input_ids"], skip_special_tokens=True
        )
    assert tokenizer.eos_token_ids == (2,)
    tokenizer.close()


def test_padding_and_truncation_in_the_file_are_not_for_us(tmp_path: Path) -> None:
    made = _byte_fallback()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = Tokenizer(_save(made, tmp_path))
    assert len(tokenizer.encode("h" * 50, False)) == 51
    assert len(tokenizer.encode("h", False)) == 2
    tokenizer.close()


def test_word_piece_falls_back_to_the_library(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3, "game": 4}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(_save(made, tmp_path))
    assert tokenizer.pieces is None
    assert tokenizer.decode(tokenizer.encode("playing a game")) == "playing a game"
    tokenizer.close()


def test_a_template_of_the_folder_and_its_special_tokens(tmp_path: Path) -> None:
    folder = _save(_byte_fallback(), tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}\n"
        "    {% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ bos_token }}{% generation %}{{ m.content }}{% endgeneration %}{{ m | tojson }}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ extra }}"
    )
    import transformers

    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    chat = [
        {"role": "user", "content": "<b>é"},
        {"role": "skip", "content": ""},
        {"role": "user", "content": "2"},
    ]
    text = tokenizer.render_chat(chat, kwargs={"extra": "!", "messages": []})
    assert text == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, extra="!")
    with pytest.raises(InvalidRequestError, match="no such role"):
        tokenizer.render_chat([{"role": "bad", "content": ""}])
    tokenizer.close()


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    folder = _save(_byte_fallback(), tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    tokenizer = Tokenizer(folder)
    with pytest.raises(InvalidRequestError, match="messages"):
        tokenizer.render_chat([{"role": "user", "content": ""}])
    tokenizer.close()


def test_no_template_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_save(_byte_fallback(), tmp_path))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    tokenizer.close()


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    _save(_byte_fallback(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)
    _save(_byte_fallback(), tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelLoadError, match="does not compile"):
        Tokenizer(tmp_path)
