"""Reads safetensors checkpoints, and refuses broken ones before a byte of weights is read.

Owns which files of a folder hold weights (the index alone decides; files it does not name are ignored), and the
proof that they are whole: every header parses, every shard exists and is as long as its header says, every tensor
of the index is in its shard. Pickled weights are never opened. Knows nothing of modules; `open_checkpoint` imports
neither torch nor safetensors, so that the front door can refuse a broken folder within milliseconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.protos.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
_LENGTH_BYTES = 8
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: str
    """safetensors' name: "F32", "BF16", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are present and whole."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    def main_dtype(self) -> str:
        """safetensors' name of the dtype that holds most elements."""
        elements: Counter[str] = Counter()
        for entry in self.tensors.values():
            elements[entry.dtype] += math.prod(entry.shape)
        return elements.most_common(1)[0][0]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find and verify the weights of `folder` without reading them. Raises `ModelLoadError` naming file or tensor."""
    index = folder / INDEX_FILE
    if index.is_file():
        return Checkpoint(folder, _from_index(folder, index))
    single = folder / SINGLE_FILE
    if single.is_file():
        return Checkpoint(folder, read_header(single))
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelLoadError(
            f"{folder} holds pickled weights only, which can run code and are never loaded; "
            f"convert them to safetensors ({SINGLE_FILE})"
        )
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _from_index(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    headers: dict[str, dict[str, TensorEntry]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(
                f"{index} names {shard!r} for tensor {name}; a shard is a file of the same folder"
            )
        if shard not in headers:
            headers[shard] = read_header(folder / shard)
        if name not in headers[shard]:
            raise ModelLoadError(f"{folder / shard} lacks tensor {name}, which {INDEX_FILE} says it holds")
        tensors[name] = headers[shard][name]
    return tensors


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises `ModelLoadError` when it is missing, truncated or not one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
                raise ModelLoadError(f"{file} is truncated or no safetensors file ({size} bytes)")
            raw = stream.read(length)
    except FileNotFoundError:
        raise ModelLoadError(f"missing weights: {file} does not exist") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror}") from error
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        entries = {
            name: TensorEntry(file, str(e["dtype"]), tuple(map(int, e["shape"])))
            for name, e in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{file} is no safetensors file: its header does not parse") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        state = "truncated" if size < expected else "longer than it should be"
        raise ModelLoadError(f"{file} is {state}: it has {size} bytes and its header describes {expected}")
    return entries


def read_tensors(checkpoint: Checkpoint, *, drop: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Map the checkpoint's tensors, less those named in `drop`, into memory on the CPU.

    The tensors are views of the mapped files: nothing is read until it is touched, and workers on one machine
    share the pages. They must not be written to.
    """
    from safetensors import SafetensorError, safe_open

    names: dict[Path, list[str]] = {}
    for name, entry in checkpoint.tensors.items():
        if name not in drop:
            names.setdefault(entry.file, []).append(name)
    tensors = {}
    for file, members in names.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                tensors.update({name: reader.get_tensor(name) for name in members})
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {file}: {error}") from error
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`. Raises `ModelLoadError` naming the file when it is missing or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds {type(value).__name__}, not a JSON object")
    return value
