"""Case D01 with the real model: a pool far too small for its requests changes when tokens come, and nothing else."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from octavo import Engine, SamplingParams

from ..golden import assert_equals_entry

pytestmark = pytest.mark.model

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 40, 100
NUM_BLOCKS = 24
"""Three whole requests of nine blocks do not fit."""
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
PREEMPTIONS_MAX = 10


def prompts(vocab_size: int) -> list[list[int]]:
    """Of distinct ids, so that none shares a block with another."""
    ids = np.random.default_rng(24).permutation(np.arange(100, vocab_size))
    return ids[: NUM_REQUESTS * PROMPT_TOKENS].reshape(NUM_REQUESTS, PROMPT_TOKENS).tolist()


@pytest.fixture(scope="module")
def reference(default_model_dir):
    """Each request's answer where there is room for all of them, as an entry for rule R1."""
    with Engine(num_blocks=96, max_num_seqs=8, host_blocks=0) as engine:
        outputs = engine.generate(prompts(engine.model.vocab_size), PARAMS)
        assert engine.stats()["preemptions"] == {"recompute": 0, "swap": 0}
    gc.collect()
    return [
        {
            "id": f"request {number}",
            "token_ids": output.outputs[0].token_ids,
            "margins": [
                entry.top_logprobs[0] - entry.top_logprobs[1] for entry in output.outputs[0].logprobs
            ],
        }
        for number, output in enumerate(outputs)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("preemption", "streamed"), [("recompute", False), ("swap", True), ("auto", False)])
def test_d01_pressure_is_invisible(preemption, streamed, reference):
    with Engine(num_blocks=NUM_BLOCKS, max_num_seqs=8, host_blocks=100, preemption=preemption) as engine:
        asked = prompts(engine.model.vocab_size)
        if streamed:
            streams = [engine.stream(prompt, PARAMS) for prompt in asked]
            answers = [[token for delta in stream for token in delta.token_ids] for stream in streams]
        else:
            outputs = engine.generate(asked, PARAMS)
            assert max(output.metrics.num_preemptions for output in outputs) <= PREEMPTIONS_MAX
            answers = [output.outputs[0].token_ids for output in outputs]
        stats = engine.stats()
        engine.check_integrity()
        assert engine.info.num_host_blocks == 100
        assert engine.info.host_link_bytes_per_second > 0
    for entry, token_ids in zip(reference, answers, strict=True):
        assert len(token_ids) == OUTPUT_TOKENS
        assert_equals_entry(entry, token_ids)
    by_kind = stats["preemptions"]
    assert sum(by_kind.values()) > 0, "without preemption this proves nothing"
    if preemption != "auto":
        assert by_kind == {**dict.fromkeys(by_kind, 0), preemption: by_kind[preemption]}
    if preemption == "swap":
        assert stats["recomputed_tokens"] == 0
    assert (stats["blocks_used"], stats["host_blocks_used"]) == (0, 0)
    assert (stats["running"], stats["waiting"], stats["swapped"]) == (0, 0, 0)
    assert stats["host_blocks_total"] == 100
    gc.collect()
