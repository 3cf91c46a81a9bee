"""What a model's name means, and cases D26 and D27: odd but right checkpoints load, broken ones say what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.protos.errors import ConfigError, ModelLoadError
from octavo.worker import hub, loader
from octavo.worker.loader import load_model, read_model_info, resolve_model

from .model_support import CPU, PagedSession, load

PROMPT = list(range(3, 43))
SHARD = "model-0000{}-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _never_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo_id: str, **_: Any) -> Path:
        raise AssertionError(f"{repo_id} was sent to a hub")

    monkeypatch.setattr(loader, "download", refuse)


@pytest.fixture
def folder(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A tied tiny Llama with an unusual RoPE base, free to change."""
    made = tiny_model_dir(
        "llama", tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 200.0}
    )
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit_config(folder: Path, *remove: str, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in remove:
        del config[key]
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def edit_weights(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], name: str = "model.safetensors"
) -> None:
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
    edit(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split model.safetensors in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {SHARD.format(1): names[: len(names) // 2], SHARD.format(2): names[len(names) // 2 :]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in halves.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def logits(folder: Path) -> torch.Tensor:
    return PagedSession(load(folder), num_blocks=4).step([(0, PROMPT)])


# Case D26: configurations and heads


def test_d26_rope_theta_at_top_level_equals_rope_parameters(folder: Path) -> None:
    expected = logits(folder)
    edit_config(folder, "rope_parameters", rope_theta=200.0)
    assert torch.equal(logits(folder), expected)
    edit_config(folder, rope_theta=201.0)
    assert not torch.equal(logits(folder), expected), "the base is not read at all"


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["default", "linear"])
def test_d26_old_key_type_equals_rope_type(key: str, kind: str, folder: Path) -> None:
    extra = {"factor": 2.0} if kind == "linear" else {}
    edit_config(folder, rope_parameters={"rope_type": kind, "rope_theta": 200.0, **extra})
    expected = logits(folder)
    edit_config(folder, "rope_parameters")
    edit_config(folder, rope_theta=200.0, **{key: {"type": kind, **extra}})
    assert torch.equal(logits(folder), expected)


def test_d26_a_head_beside_tied_embeddings_changes_nothing(folder: Path) -> None:
    expected = logits(folder)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0

    edit_weights(folder, add_head)
    loaded = load(folder)
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert torch.equal(logits(folder), expected)


def test_d26_an_untied_head_is_used(folder: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2.0

    expected = logits(folder)
    edit_config(folder, tie_word_embeddings=False)
    edit_weights(folder, add_head)
    torch.testing.assert_close(logits(folder), expected * 2.0)


def test_d26_a_missing_untied_head_is_refused_by_name(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_d26_an_unknown_rope_type_is_refused_by_name(key: str, name: str, folder: Path) -> None:
    edit_config(folder, "rope_parameters")
    edit_config(folder, rope_theta=200.0, **{key: {name: "banana"}})
    with pytest.raises(ModelLoadError, match="banana"):
        resolve_model(str(folder))


def test_d26_an_unknown_rope_type_of_one_kind_of_layer_is_refused(folder: Path) -> None:
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "banana"}}
    edit_config(folder, rope_parameters=nested)
    with pytest.raises(ModelLoadError, match="banana"):
        resolve_model(str(folder))


# Case D27: broken checkpoints


def refused(folder: Path | str) -> str:
    """The one line with which `folder` is refused before any weight is read, let alone torch imported."""
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(folder))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "spec", ["/no/such/model", "./no-such-model", "../no-such-model", "~/no-such-model", "x.gguf"]
)
def test_d27_a_path_that_does_not_exist_is_named_and_never_sent_to_a_hub(spec: str) -> None:
    assert str(Path(spec).expanduser().absolute()) in refused(spec)


@pytest.mark.parametrize("spec", ["", " ", "a b", "one/two/three", "bad\0name", "-x"])
def test_d27_what_is_neither_path_nor_hub_id_is_refused(spec: str) -> None:
    assert repr(spec) in refused(spec)


def test_d27_a_folder_without_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    message = refused(folder)
    assert str(folder) in message
    assert "config.json" in message


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "{}"])
def test_d27_a_broken_config_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(folder)


def test_d27_a_deleted_shard_is_named(folder: Path) -> None:
    shard(folder)
    load(folder)
    (folder / SHARD.format(2)).unlink()
    assert str(folder / SHARD.format(2)) in refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_d27_a_truncated_file_is_named(keep: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refused(folder)
    assert str(file) in message
    assert "truncated" in message


@pytest.mark.parametrize("sharded", [False, True])
def test_d27_stray_files_are_not_loaded(sharded: bool, folder: Path) -> None:
    expected = logits(folder)
    stray = {name: tensor + 1.0 for name, tensor in load_file(folder / "model.safetensors").items()}
    if sharded:
        shard(folder)
        save_file(stray, folder / "model.safetensors")  # beside an index, this name too is a stray
    save_file(stray, folder / "zz-stray.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert torch.equal(logits(folder), expected)


def test_d27_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(5, 32)}))
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert name in caught.value.message
    assert "(5, 32)" in caught.value.message
    assert "(64, 32)" in caught.value.message


def test_d27_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.self_attn\.k_proj\.weight"):
        load(folder)


def test_d27_an_index_that_lies_is_named(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    content["weight_map"][first] = SHARD.format(2)
    index.write_text(json.dumps(content))
    assert first in refused(folder)
    content["weight_map"][first] = "../model.safetensors"
    index.write_text(json.dumps(content))
    assert "../model.safetensors" in refused(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled" in refused(folder)


def test_quantised_checkpoints_are_refused_by_method(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refused(folder)


def test_encoder_decoders_are_refused(folder: Path) -> None:
    edit_config(folder, model_type="t5", is_encoder_decoder=True)
    assert "encoder-decoder" in refused(folder)


def test_an_unknown_model_type_is_refused_by_name(folder: Path) -> None:
    edit_config(folder, model_type="no_such_architecture")
    with pytest.raises(ModelLoadError, match="no_such_architecture"):
        load(folder)


def test_code_in_a_model_folder_is_not_run_unless_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    proof = folder / "ran"
    (folder / "code.py").write_text(f"open({str(proof)!r}, 'w').close()\nraise ImportError('it ran')\n")
    edit_config(
        folder, model_type="its_own", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    )
    with pytest.raises(ModelLoadError):
        load(folder)
    assert not proof.exists()
    with pytest.raises(ModelLoadError, match="it ran"):
        load_model(resolve_model(str(folder), trust_remote_code=True), device=CPU)
    assert proof.exists()


# Names, dtypes, hubs


def test_model_info_needs_the_json_files_only(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 999]}))
    tokenizer = {"added_tokens": [{"id": 9, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    source = resolve_model(str(folder))
    info = read_model_info(source)
    assert (info.name, info.vocab_size, info.max_model_len) == ("model", 128, 512)
    assert info.eos_token_ids == (2, 5, 7, 9), "the model's, the generation config's and the tokenizer's"
    assert source.tokenizer_dir == folder
    edit_config(folder, vocab_size=None)
    with pytest.raises(ModelLoadError, match="vocab_size"):
        read_model_info(source)


def test_resolving_a_model_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from octavo.worker.loader import read_model_info, resolve_model; "
        "print(read_model_info(resolve_model(sys.argv[1])).vocab_size); "
        "print(sorted({'torch', 'transformers', 'ray', 'grpc'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert out.stdout.split() == ["128", "[]"]


def test_an_existing_relative_folder_is_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model").folder == folder
    assert resolve_model("model").name == "model"


def test_dtypes(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    source = resolve_model(str(folder))
    assert load_model(source, device=CPU).dtype == torch.float32, "auto on a CPU"
    assert load_model(source, device=CPU, dtype="bfloat16").dtype == torch.bfloat16
    assert loader._choose_dtype("auto", "cuda", loader.open_checkpoint(folder)) == "bfloat16"
    with pytest.raises(ConfigError, match="int4") as caught:
        load_model(source, device=CPU, dtype="int4")
    assert caught.value.param == "dtype"


def test_weights_stay_mapped_when_the_dtype_is_the_same(folder: Path) -> None:
    tensors = loader.read_tensors(loader.open_checkpoint(folder))
    from octavo.worker import attention, module_graph

    attention.register()
    config = module_graph.read_config(folder, False)
    chosen = module_graph.model_class(config, folder, False)
    norm = tensors["model.norm.weight"]
    module = module_graph.build(chosen, config, tensors, torch.float32, folder)
    assert module.model.norm.weight.data_ptr() == norm.data_ptr()


def test_a_hub_id_fetches_no_pickle_and_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(loader, "download", hub.download)
    source = resolve_model("someone/some-model")
    assert (source.name, source.folder) == ("someone/some-model", folder)
    resolve_model("someone/some-model", trust_remote_code=True)
    assert [repo_id for repo_id, _ in asked] == ["someone/some-model"] * 2
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(asked[0][1])
    assert "*.py" in asked[1][1]


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(repo_id: str, **_: Any) -> str:
        raise ConnectionError("no route\nand a page of advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(loader, "download", hub.download)
    message = refused("someone/some-model")
    assert "someone/some-model" in message
    assert "no route" in message
