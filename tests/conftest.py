"""Fixtures that several folders of tests share: the default model, its reference answers, tiny random models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before any test imports Ray, which reads it then: `ray_access.require_token` would come too late.
os.environ.setdefault("RAY_AUTH_MODE", "token")

import octavo.worker  # noqa: F401 - before any test imports torch: it sets how long OpenMP's threads spin

from .golden import Golden

# How long an example takes says how busy the machine is. What was found stays found: the same examples every time.
settings.register_profile("octavo", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("octavo")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's folder; fetched and converted when this machine has none (about 30 s, once)."""
    from octavo.worker.default_model import default_model_dir

    return default_model_dir()


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden()


_TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory: `tiny_model_dir("llama", tie_word_embeddings=True)` is a folder with a small random model.

    The family is a model type of transformers; keywords override its configuration. Weights are the same in every
    run. Folders are made once per session and shared: copy one before changing it. There is no tokenizer.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: object) -> Path:
        key = json.dumps([family, overrides], sort_keys=True, default=str)
        if key not in made:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(family, **{**_TINY, **overrides})
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(20)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases start as constants, which would hide mix-ups
                        torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
            folder = tmp_path_factory.mktemp(f"tiny-{family}")
            model.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
