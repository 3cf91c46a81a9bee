"""A GGUF file with its quantised weights widened to float32: the same numbers, for an engine to compute with exactly.

Runs in llama.cpp's environment, with the `gguf` package.
"""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf.quants import dequantize

_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")
"""Fields that the writer makes itself or that would be false of the copy."""


def widened(source: Path) -> Path:
    """`source` with F32 weights, in a file beside it that is made once."""
    target = source.with_suffix(".F32.gguf")
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_BY_WRITER):
            element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)
