"""A model that can be served and costs next to nothing: random weights behind the default model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path


def tiny_model(folder: Path) -> Path:
    """Fill an empty folder. The weights are the same every time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo.worker.default_model import default_model_dir

    for file in default_model_dir().iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "generation_config.json"):
            shutil.copy(file, folder / file.name)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llama", vocab_size=49152, num_key_value_heads=1, initializer_range=0.5, **sizes
    )
    torch.manual_seed(20)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
