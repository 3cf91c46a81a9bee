"""From what the user calls a model to a model that can run.

Owns the meaning of a model's name (the default model, a folder, a .gguf file, a hub id) and the loading of weights
into transformers' module graph. Every way in which a checkpoint can be wrong ends here, as a `ModelLoadError` that
names the path or the tensor. Importing this module, `resolve_model` and `read_model_info` pull in neither torch nor
transformers: the process that serves HTTP uses those and never loads a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.protos.errors import ConfigError, ModelLoadError
from octavo.protos.types import ModelInfo
from octavo.worker import default_model, gguf, model_config
from octavo.worker.checkpoint import Checkpoint, open_checkpoint, read_tensors
from octavo.worker.hub import download

if TYPE_CHECKING:
    import torch

    from octavo.worker.attention import AttentionSite

DTYPES = ("float32", "bfloat16", "float16")
_CHECKPOINT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder on this machine, whole as far as can be told without loading it."""

    name: str
    """What the API calls the model."""
    folder: Path
    trust_remote_code: bool = False

    @property
    def tokenizer_dir(self) -> Path:
        return self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that memory planning needs. Found by running the model, not read from its configuration."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    sliding_windows: tuple[int | None, ...]
    """[num_layers] tokens each layer looks back, itself included; None: all."""

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Weights on the device in transformers' module graph, with Octavo's attention chosen."""

    module: torch.nn.Module
    config: Any
    """transformers' configuration of the language model."""
    info: ModelInfo
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    attention_sites: tuple[AttentionSite, ...]


def resolve_model(spec: str | None = None, *, trust_remote_code: bool = False) -> ModelSource:
    """Find, and if need be fetch or convert, the model that `spec` means; verify its files.

    None is the default model. What exists on disk, or looks like a path (absolute, `./`, `../`, `~`, ends in
    `.gguf`), is a path and is never sent to a hub. Anything else is a hub id. Raises `ModelLoadError`.
    """
    if spec is None:
        name, folder = default_model.NAME, default_model.default_model_dir()
    else:
        name, folder = _locate(spec, trust_remote_code)
    model_config.read_config(folder)
    open_checkpoint(folder)
    return ModelSource(name, folder, trust_remote_code)


def _locate(spec: str, trust_remote_code: bool) -> tuple[str, Path]:
    if not spec.strip() or "\0" in spec:
        raise ModelLoadError(f"{spec!r} names no model")
    try:
        path = Path(spec).expanduser()
        exists, is_file = path.exists(), path.is_file()
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"cannot read {spec}: {error}") from error
    looks_like_path = spec.startswith(("/", "./", "../", "~", ".\\", "..\\")) or spec in (".", "..")
    looks_like_path = looks_like_path or path.is_absolute() or spec.lower().endswith(".gguf")
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path.absolute()} is a file; a model is a folder or a .gguf file")
        return path.stem, gguf.converted_dir(path)
    if exists:
        return path.resolve().name, path.absolute()
    if looks_like_path:
        raise ModelLoadError(f"{path.absolute()} does not exist")
    if not _HUB_ID.fullmatch(spec):
        raise ModelLoadError(f"{spec!r} is neither an existing path nor a hub id (ORGANISATION/NAME)")
    return spec, download(spec, with_code=trust_remote_code)


def read_model_info(source: ModelSource) -> ModelInfo:
    """What the front door must know of the model. Raises `ModelLoadError`."""
    return model_config.read_model_info(source.folder, source.name)


def load_model(source: ModelSource, *, device: torch.device, dtype: str = "auto") -> LoadedModel:
    """Load weights onto `device` and find out what the model's attention needs.

    `dtype` is one of `DTYPES`, or "auto": float32 on a CPU, the checkpoint's own on anything else. On a CPU the
    weights of a checkpoint in that dtype stay mapped from their files. Raises `ModelLoadError` naming the path or
    tensor that is wrong, or why the model cannot run here; `ConfigError` for an unknown dtype.
    """
    import torch

    from octavo.worker import attention, module_graph

    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}", param="dtype")
    info = read_model_info(source)
    checkpoint = open_checkpoint(source.folder)
    torch_dtype = getattr(torch, _choose_dtype(dtype, device.type, checkpoint))
    attention.register()
    with module_graph.quiet():
        config = module_graph.read_config(source.folder, source.trust_remote_code)
        model_class = module_graph.model_class(config, source.folder, source.trust_remote_code)
        tensors = read_tensors(
            checkpoint, drop=module_graph.redundant_heads(model_class, config, checkpoint.tensors)
        )
        module = module_graph.build(model_class, config, tensors, torch_dtype, source.folder)
        module = module_graph.place(module, device)
        sites = module_graph.probe(module, config, device)
    shape = ModelShape(
        num_layers=len(sites),
        num_heads=sites[0].num_heads,
        num_kv_heads=sites[0].num_kv_heads,
        head_dim=sites[0].head_dim,
        hidden_size=config.hidden_size,
        vocab_size=info.vocab_size,
        sliding_windows=tuple(site.sliding_window for site in sites),
    )
    return LoadedModel(
        module=module,
        config=config,
        info=info,
        shape=shape,
        dtype=torch_dtype,
        device=device,
        attention_sites=sites,
    )


def _choose_dtype(dtype: str, device_type: str, checkpoint: Checkpoint) -> str:
    if dtype != "auto":
        return dtype
    stored = checkpoint.main_dtype()
    if stored not in _CHECKPOINT_DTYPES:
        raise ModelLoadError(
            f"{checkpoint.folder} stores weights as {stored}; name a dtype: {', '.join(DTYPES)}"
        )
    return "float32" if device_type == "cpu" else _CHECKPOINT_DTYPES[stored]
