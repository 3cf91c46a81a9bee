"""Builds transformers' module graph around weights that are already mapped into memory.

Owns every call into transformers' loading: configuration, model class, weights (its own renaming and merging of
checkpoint names included), and the translation of what it complains about into one line. The weights come from
`checkpoint.py`, so no file is chosen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from octavo.protos.errors import ModelLoadError
from octavo.worker.attention import IMPLEMENTATION, AttentionSite, find_sites

_AUTO_CLASS = "AutoModelForCausalLM"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the user's terminal; what matters we raise ourselves."""
    from transformers.utils import logging

    control: Any = logging
    verbosity, bars = control.get_verbosity(), control.is_progress_bar_enabled()
    control.set_verbosity_error()
    control.disable_progress_bar()
    try:
        yield
    finally:
        control.set_verbosity(verbosity)
        if bars:
            control.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' configuration of the folder. Raises `ModelLoadError` with what it says is wrong."""
    try:
        return AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the edge: configurations are validated by code of every kind
        raise ModelLoadError(
            f"{folder / 'config.json'} is not accepted by transformers: {_first_line(error)}"
        ) from error


def model_class(config: Any, folder: Path, trust_remote_code: bool) -> Any:
    """The causal language model class for `config`. Raises `ModelLoadError` for one that Octavo cannot run."""
    chosen: Any
    remote = (getattr(config, "auto_map", None) or {}).get(_AUTO_CLASS)
    if remote is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        chosen = get_class_from_dynamic_module(remote, str(folder))
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        chosen = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        raise ModelLoadError(
            f"cannot run {config.model_type} ({folder}): transformers has no causal language model of it"
        )
    if config.get_text_config() is not config:
        raise ModelLoadError(f"cannot run {config.model_type} ({folder}): only text models run here")
    if getattr(chosen, "_is_stateful", False):
        raise ModelLoadError(
            f"cannot run {config.model_type} ({folder}): it keeps a recurrent state beside attention"
        )
    if not getattr(chosen, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"cannot run {config.model_type} ({folder}): its attention does not go through transformers' interface"
        )
    return chosen


def redundant_heads(chosen: Any, config: Any, names: Collection[str]) -> set[str]:
    """Checkpoint names of tensors that the configuration ties to another one that is also present.

    Some files store a copy of the tied head. The configuration decides: the copy is not loaded.
    """
    tied = getattr(chosen, "_tied_weights_keys", None)
    if not config.tie_word_embeddings or not isinstance(tied, dict):
        return set()
    return {copy for copy, original in tied.items() if copy in names and original in names}


def build(
    chosen: Any, config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path
) -> nn.Module:
    """The module with `tensors` as its weights, in `dtype`, on the CPU; no copy where the dtype is the same.

    Raises `ModelLoadError` naming the tensor that is missing or has the wrong shape.
    """
    try:
        module, report = chosen.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            ignore_mismatched_sizes=True,  # so that they are reported by name, below
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:  # the edge: model constructors raise whatever their configuration breaks
        raise ModelLoadError(
            f"cannot build {config.model_type} from {folder}: {_first_line(error)}"
        ) from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"tensor {name} of {folder} has shape {tuple(found)}, but {config.model_type} of this configuration "
            f"needs {tuple(expected)}"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"the checkpoint in {folder} lacks tensor {missing[0]}{more}")
    for problem in report.get("error_msgs") or ():
        raise ModelLoadError(f"cannot load the checkpoint in {folder}: {problem}")
    loaded: nn.Module = module.eval().requires_grad_(False)
    return loaded


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Move to `device`. Raises `ModelLoadError` when it does not fit."""
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        needed = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**30
        raise ModelLoadError(
            f"the weights ({needed:.1f} GiB) do not fit on {device}: {_first_line(error)}"
        ) from error


def probe(module: nn.Module, config: Any, device: torch.device) -> tuple[AttentionSite, ...]:
    """Run one token with attention that only takes notes. Raises `ModelLoadError` for what cannot run."""
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)

    def run() -> None:
        with torch.inference_mode():
            module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=row)

    try:
        return find_sites(config, run)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelLoadError(f"cannot run {config.model_type}: {_first_line(error)}") from error
