"""The forward pass equals Hugging Face's, whatever the family, the chunks and the blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.protos.errors import ModelLoadError
from octavo.worker.accelerate import accelerate

from ..golden import Golden, assert_equals_entry
from .model_support import PagedSession, hf_logits, load

FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama scaled rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, sliding window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma2, soft caps": (
        "gemma2",
        {
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 512}),
    "gpt_neox": ("gpt_neox", {}),
    "granite": ("granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
}


FUSED = {
    "llama",
    "llama tied",
    "llama scaled rope",
    "llama biased",
    "mistral, sliding window",
    "qwen2",
    "qwen3",
}
"""Built like Llama; every other family keeps its module graph, with other matrix products."""


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hugging_face_over_chunks_and_decodes(
    family: str, accelerated: bool, tiny_model_dir: Callable[..., Path]
) -> None:
    model_type, overrides = FAMILIES[family]
    folder = tiny_model_dir(model_type, **overrides)
    loaded = load(folder)
    decoder = accelerate(loaded) if accelerated else None
    assert (decoder is not None) == (accelerated and family in FUSED)
    rng = np.random.default_rng(3)
    prompts = {sequence: rng.integers(3, 128, size).tolist() for sequence, size in enumerate((40, 1, 17, 33))}
    session = PagedSession(loaded, num_blocks=64, block_size=8, decoder=decoder)
    got: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in prompts}
    done = dict.fromkeys(prompts, 0)
    # Chunk sizes differ by sequence and step; a sequence with one token left is a decode beside the others' chunks.
    for sizes in ({0: 10, 1: 1}, {2: 16, 0: 1, 3: 9}, {3: 24, 0: 20, 2: 1}, {0: 9}):
        chunks = [(s, prompts[s][done[s] : done[s] + size]) for s, size in sizes.items()]
        logits = session.step(chunks)
        for s, tokens in chunks:
            got[s].append(logits[: len(tokens)])
            logits = logits[len(tokens) :]
            done[s] += len(tokens)
    for s, ids in prompts.items():
        assert done[s] == len(ids)
        torch.testing.assert_close(torch.cat(got[s]), hf_logits(folder, ids), rtol=0, atol=1e-4)


def test_the_head_runs_on_the_asked_rows_only(tiny_model_dir: Callable[..., Path]) -> None:
    loaded = load(tiny_model_dir())
    seen: list[tuple[int, ...]] = []
    loaded.module.lm_head.register_forward_hook(lambda _m, args, _out: seen.append(tuple(args[0].shape)))
    ids = list(range(3, 33))
    every = PagedSession(loaded, num_blocks=8).step([(0, ids)])
    some = PagedSession(loaded, num_blocks=8).step([(0, ids)], rows=[29, 4])
    none = PagedSession(loaded, num_blocks=8).step([(0, ids)], rows=[])
    assert [shape[1] for shape in seen] == [30, 2, 0]
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, every[[29, 4]])
    assert none.shape == (0, 128)


def test_half_precision_weights_give_float32_logits(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir()
    loaded = load(folder, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    ids = list(range(3, 23))
    logits = PagedSession(loaded, num_blocks=8).step([(0, ids)])
    assert logits.dtype == torch.float32
    reference = hf_logits(folder, ids)
    assert (logits - reference).abs().max() < 0.05 * reference.abs().max()


def test_shape_is_what_the_model_does(tiny_model_dir: Callable[..., Path]) -> None:
    shape = load(tiny_model_dir("gemma2", sliding_window=8)).shape
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 4, 2, 16)
    assert shape.sliding_windows == (8, None, 8)
    assert shape.kv_elements_per_token == 2 * 3 * 2 * 16


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("mamba", {"state_size": 4}, "mamba"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "interface|attention"),
        ("jamba", {"num_hidden_layers": 8, "num_experts": 2}, "jamba"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_that_paged_attention_cannot_run_are_refused_with_the_reason(
    family: str, overrides: dict[str, object], reason: str, tiny_model_dir: Callable[..., Path]
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load(tiny_model_dir(family, **overrides))


def _greedy(session: PagedSession, prompt: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Prefill in chunks of at most 512, then decode: the ids and the logits they were chosen from."""
    logits = torch.empty(0)
    for start in range(0, len(prompt), 512):
        chunk = prompt[start : start + 512]
        logits = session.step([(0, chunk)], rows=[len(chunk) - 1])
    rows, ids = [logits], [int(logits.argmax())]
    while len(ids) < new_tokens:
        rows.append(session.step([(0, ids[-1:])]))
        ids.append(int(rows[-1].argmax()))
    return ids, torch.cat(rows)


@pytest.mark.model
def test_d26_default_model_equals_hugging_face_after_10_tokens(default_model_dir: Path) -> None:
    prompt = np.random.default_rng(7).integers(1000, 40000, 10).tolist()
    loaded = load(default_model_dir)
    session = PagedSession(loaded, num_blocks=5, decoder=accelerate(loaded))
    ids, logits = _greedy(session, prompt, 64)
    # One pass over our own answer: equal argmax at every position means that the greedy answers are equal.
    reference = hf_logits(default_model_dir, prompt + ids[:-1], keep=64)
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-3)
    top = reference.topk(2)
    assert_equals_entry(
        {
            "id": "10 tokens",
            "token_ids": top.indices[:, 0].tolist(),
            "margins": (top.values[:, 0] - top.values[:, 1]).tolist(),
        },
        ids,
    )


@pytest.mark.model
def test_d26_default_model_equals_hugging_face_after_3000_tokens(
    default_model_dir: Path, golden: Golden
) -> None:
    """A wrong RoPE base can look fine at 10 tokens and shows here. The reference was computed once and stored."""
    entry = golden.long_context
    assert len(entry["prompt_ids"]) == 3000
    loaded = load(default_model_dir)
    session = PagedSession(loaded, num_blocks=192, decoder=accelerate(loaded))
    ids, logits = _greedy(session, entry["prompt_ids"], 64)
    assert_equals_entry(entry, ids)
    same = (
        next(
            (i for i, (a, b) in enumerate(zip(ids, entry["token_ids"], strict=True)) if a != b), len(ids) - 1
        )
        + 1
    )
    stored = logits.gather(1, torch.tensor(entry["top_ids"]))[:same]
    torch.testing.assert_close(stored, torch.tensor(entry["top_logits"])[:same], rtol=0, atol=1e-3)
