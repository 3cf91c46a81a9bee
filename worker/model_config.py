"""What can be learned of a model from its JSON files alone, and which models are refused on that ground.

Owns the reading of `config.json` and `generation_config.json` into `ModelInfo` for the front door, and the refusals
that need no module: unknown RoPE types, encoder-decoders, quantised checkpoints, layers that are not attention.
Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.protos.errors import ModelLoadError
from octavo.protos.types import ModelInfo
from octavo.worker.checkpoint import read_json

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_seq_len",
)
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Their frequencies depend on the position alone."""
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope", "su")
"""Their frequencies depend on the longest sequence in the batch, so cached keys would change meaning."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder, checked by `check_config`. Raises `ModelLoadError`."""
    if not (folder / CONFIG_FILE).is_file():
        raise ModelLoadError(f"{folder} is not a model folder: it has no {CONFIG_FILE}")
    config = read_json(folder / CONFIG_FILE)
    check_config(config, folder)
    return config


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `ModelLoadError` for a model that Octavo cannot run, as far as `config.json` tells."""

    def refuse(reason: str) -> None:
        raise ModelLoadError(f"cannot run the model in {folder}: {reason}")

    if not isinstance(config.get("model_type"), str):
        refuse(f"{CONFIG_FILE} has no model_type")
    text = text_config(config)
    if config.get("is_encoder_decoder"):
        refuse(f"{config['model_type']} is an encoder-decoder; only decoder-only models run here")
    if config.get("quantization_config") is not None:
        method = (config["quantization_config"] or {}).get("quant_method", "unknown")
        refuse(f"its weights are quantised ({method}); use float32, bfloat16 or float16 safetensors, or GGUF")
    if text.get("alibi") or text.get("position_embedding_type") == "alibi":
        refuse("it uses ALiBi position biases, which paged attention does not compute")
    for layer_type in sorted(set(map(str, text.get("layer_types") or ()))):
        if layer_type not in _LAYER_TYPES:
            refuse(f"it has {layer_type} layers; only {' and '.join(_LAYER_TYPES)} run here")
    for rope_type in rope_types(text):
        if rope_type in _LENGTH_DEPENDENT_ROPE_TYPES:
            refuse(
                f"rope_type {rope_type!r} changes with the longest sequence of a batch, so a KV cache shared by many "
                f"requests would hold wrong positions"
            )
        if rope_type not in _STATIC_ROPE_TYPES:
            refuse(f"unknown rope_type {rope_type!r}; known are {', '.join(_STATIC_ROPE_TYPES)}")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a composite configuration that describes the language model; else the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) and "hidden_size" in nested else config


def rope_types(config: dict[str, Any]) -> Iterator[str]:
    """Every RoPE type that a configuration names, under the new key `rope_type` or the old one, `type`.

    The parameters are one object, or one per kind of layer.
    """
    for key in _ROPE_KEYS:
        parameters = config.get(key)
        if not isinstance(parameters, dict):
            continue
        per_layer_type = all(isinstance(value, dict) for value in parameters.values())
        for entry in parameters.values() if per_layer_type else (parameters,):
            yield str(entry.get("rope_type", entry.get("type", "default")))


def read_model_info(folder: Path, name: str) -> ModelInfo:
    """What the front door must know of the model in `folder`. Raises `ModelLoadError` naming what is missing."""
    config = read_config(folder)
    text = text_config(config)
    vocab_size = _positive(folder, "vocab_size", text.get("vocab_size", config.get("vocab_size")))
    lengths = (text[key] for key in _LENGTH_KEYS if text.get(key) is not None)
    return ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_model_len=_positive(folder, _LENGTH_KEYS[0], next(lengths, None)),
        eos_token_ids=_eos_token_ids(folder, text, vocab_size),
    )


def _positive(folder: Path, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{folder / CONFIG_FILE} must state {key} as a positive integer, got {value!r}")
    return value


def _eos_token_ids(folder: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """All ids that end a generation: the generation config's, the model's and the tokenizer's.

    Chat models often differ in the three (the tokenizer's ends a turn, the model's ends a document).
    """
    found: set[int] = set()
    generation = folder / GENERATION_CONFIG_FILE
    for source in (config, read_json(generation) if generation.is_file() else {}):
        ids = source.get("eos_token_id")
        found.update(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))
    token = _tokenizer_eos_id(folder)
    if token is not None:
        found.add(token)
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _tokenizer_eos_id(folder: Path) -> int | None:
    settings, tokenizer = folder / TOKENIZER_CONFIG_FILE, folder / TOKENIZER_FILE
    if not settings.is_file() or not tokenizer.is_file():
        return None
    eos = read_json(settings).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(tokenizer).get("added_tokens") or ()
    return next((token["id"] for token in added if text is not None and token.get("content") == text), None)
