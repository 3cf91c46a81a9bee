"""Compiling every Triton kernel for a GPU that isn't there, and what each then needs of it.

Owns the compilation of `aot_variants` and the reading of registers, spills, shared memory and instructions out of
what it gives. Needs triton with its bundled tools, no GPU and no driver.

    python -m octavo.kernels.aot          prints the table of docs/kernels.md
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.aot_variants import Variant, variants

SHARED_BYTES_MAX: Mapping[int, int] = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may have, by compute capability times ten (CUDA programming guide)."""

_LOAD = re.compile(r"cp\.async\.c[ag]\.[^;]*?, (?:0x)?(\d+)\b|ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)")
_STORE = re.compile(r"()st\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)")
_MATRIX = {"tcgen05.mma": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma.sync": "mma.sync"}


@dataclass(frozen=True)
class Resources:
    """What the machine code of one variant uses."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Per thread, local memory and stack."""
    shared_bytes: int
    """Per program, static and dynamic."""
    load_bytes: int
    """The widest read of global memory by one thread; 16 is all that there is before sm_100."""
    store_bytes: int
    """The widest write."""
    matrix_instruction: str
    """What multiplies matrices, a key of `_MATRIX`; empty: nothing does."""


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Compile for a device of this compute capability (80, 90, 100); raises triton's or ptxas's error."""
    signature = {param.name: variant.type_of(param.name) for param in variant.kernel.params}
    # What a launch finds to be a multiple of 16; strides and sizes of real models are.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, param in enumerate(variant.kernel.params)
        if signature[param.name].startswith(("*", "i")) and not param.do_not_specialize
    }
    constants = {name: variant.constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    if variant.max_registers is not None:
        options["maxnreg"] = variant.max_registers
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used = _resource_usage(binary.asm["cubin"])
    ptx = binary.asm["ptx"]
    return Resources(
        registers=used["REG"],
        spill_bytes=used.get("STACK", 0) + used.get("LOCAL", 0),
        shared_bytes=used.get("SHARED", 0) + binary.metadata.shared,
        load_bytes=max(map(_width, _LOAD.findall(ptx)), default=0),
        store_bytes=max(map(_width, _STORE.findall(ptx)), default=0),
        matrix_instruction=next((name for name, text in _MATRIX.items() if text in ptx), ""),
    )


def _width(access: tuple[str, str, str]) -> int:
    """Bytes that one thread moves, of a match of `_LOAD` or `_STORE`."""
    async_bytes, vector, bits = access
    return int(async_bytes) if async_bytes else int(vector or 1) * int(bits) // 8


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", report)}
    if "REG" not in used:
        raise RuntimeError(f"cuobjdump said nothing of registers: {report!r}")
    return used


def main() -> None:
    """Print the table as Markdown, a line a kernel: registers, shared KiB and matrix instruction by device."""
    print("| kernel |", " | ".join(f"sm_{capability}" for capability in SHARED_BYTES_MAX), "| load, store |")
    print("|---" * (len(SHARED_BYTES_MAX) + 2) + "|")
    for variant in variants():
        found = [compile_variant(variant, capability) for capability in SHARED_BYTES_MAX]
        moves = f"{min(used.load_bytes for used in found)}, {min(used.store_bytes for used in found)}"
        print("|", " | ".join([variant.name, *map(_cell, found), moves]), "|", flush=True)


def _cell(used: Resources) -> str:
    words = [str(used.registers), f"{used.shared_bytes / 1024:.1f}"]
    words += [f"**{used.spill_bytes} spilled**"] * (used.spill_bytes > 0)
    return ", ".join([*words, used.matrix_instruction]).removesuffix(", ")


if __name__ == "__main__":
    main()
