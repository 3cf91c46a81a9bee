"""Turns a GGUF file into an ordinary model folder, once.

Owns the conversion: transformers reads and dequantises the file; what it gives (config, tokenizer with chat
template, weights) is written as `config.json`, `generation_config.json`, `tokenizer.json`, `tokenizer_config.json`
and `model.safetensors`. From then on GGUF is out of the picture and there is one loading path. The work runs in a
child process, because it needs torch, transformers and twice the weights' memory, and its callers (an HTTP process
that only wants the tokenizer) need none of them: importing this module pulls in neither.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.protos.errors import ModelLoadError
from octavo.worker.model_cache import build_once, models_root, report

MAGIC = b"GGUF"
CONVERT_SECONDS_MAX = 1700
"""Under the lock's patience (`model_cache`), so that a waiting process outlives a stuck converter."""


def converted_dir(gguf: Path) -> Path:
    """The converted folder of a GGUF file, made on first use and keyed by the file's name, size and mtime.

    Raises `ModelLoadError` for a file that is not GGUF or that transformers cannot read.
    """
    try:
        stat = gguf.stat()
        with gguf.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise ModelLoadError(f"cannot read {gguf}: {error.strerror}") from error
    if magic != MAGIC:
        raise ModelLoadError(f"{gguf} is not a GGUF file (it does not begin with {MAGIC.decode()})")
    key = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", gguf.stem)
    return build_once(
        models_root() / "gguf" / f"{name}-{digest}", lambda folder: convert_in_child(gguf, folder)
    )


def convert_in_child(gguf: Path, folder: Path) -> None:
    """Convert `gguf` into the existing, empty `folder` in a child process. Raises `ModelLoadError`."""
    report(f"converting {gguf.name} (once) ...")
    # `-c` and `-m` put the working directory on sys.path; the empty target keeps a checkout's folders off it.
    code = "import sys; from octavo.worker.gguf import main; sys.exit(main(sys.argv[1], sys.argv[2]))"
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(gguf.absolute()), str(folder.absolute())],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=CONVERT_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(f"converting {gguf} took more than {CONVERT_SECONDS_MAX} s") from None
    if done.returncode != 0:
        reason = done.stdout.strip().splitlines()
        raise ModelLoadError(
            f"cannot convert {gguf}: {reason[-1] if reason else f'the converter ended with {done.returncode}'}"
        )


def main(gguf: str, folder: str) -> int:
    """The child's entry: 0, or 1 with the reason as the last line of standard output."""
    try:
        convert(Path(gguf), Path(folder))
    except Exception as error:  # the edge of a process: whatever it was becomes one line for the parent
        print(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        return 1
    return 0


def convert(gguf: Path, folder: Path) -> None:
    """Convert in this process. Raises whatever transformers raises."""
    report("  loading torch and transformers (1/4)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from octavo.worker.module_graph import quiet

    source, name = str(gguf.parent), gguf.name
    with quiet():
        report("  tokenizer (2/4)")
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
        report("  weights (3/4)")
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype="float32")
        report("  writing (4/4)")
        _write_config(model, folder)
        _write_weights(model, folder)


def _write_config(model: Any, folder: Path) -> None:
    config = model.config
    for stale in (
        "quantization_config",
        "_model_name_or_path",
    ):  # they describe the file, not what is written here
        if hasattr(config, stale):
            delattr(config, stale)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _write_weights(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and head.weight is embedding.weight:
            state = {name: tensor for name, tensor in state.items() if not name.endswith("lm_head.weight")}
    target = folder / "model.safetensors"
    save_file(state, target, metadata={"format": "pt"})
    target.chmod(
        (folder / "config.json").stat().st_mode
    )  # the writer makes it private; be as readable as its peers
