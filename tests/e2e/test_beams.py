"""Beam search of the default model equals Hugging Face's, sequences and scores, alone and under pressure."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest

from octavo import Engine, SamplingParams

from ..golden import DATA, NEAR_TIE_NATS

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def entries():
    return json.loads((DATA / "beams.json").read_text(encoding="utf-8"))["entries"]


def params_of(entry):
    names = ("n", "beam_width", "length_penalty", "early_stopping", "max_tokens")
    return SamplingParams(**{name: entry[name] for name in names})


def assert_equals_beams(entry, output):
    """Sequences and scores; where two hypotheses are as good as tied (R1), either may stand in the place."""
    got = [(one.token_ids, one.score) for one in output.outputs]
    assert len(got) == len(entry["sequences"]), entry["id"]
    for (token_ids, score), want, want_score in zip(got, entry["sequences"], entry["scores"], strict=True):
        assert abs(score - want_score) < NEAR_TIE_NATS, f"{entry['id']}: {score}, reference {want_score}"
        assert list(token_ids) == want, f"{entry['id']}: {token_ids}, reference {want}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pressure", [False, True])
def test_equals_hugging_face(entries, pressure, default_model_dir):
    """All sixteen at once; under pressure the pool holds a fraction of them, so they are parked and come back."""
    options = (
        {"num_blocks": 60, "host_blocks": 60, "preemption": "auto"} if pressure else {"num_blocks": 1500}
    )
    with Engine(max_num_seqs=64, max_num_batched_tokens=256, **options) as engine:
        if pressure:
            engine.loop._scheduler._life.reserve._min = engine.loop._scheduler._life.reserve.horizon = 0
        outputs = engine.generate([entry["prompt_ids"] for entry in entries], [params_of(e) for e in entries])
        stats = engine.stats()
        engine.check_integrity()
    for entry, output in zip(entries, outputs, strict=True):
        assert_equals_beams(entry, output)
    assert stats["blocks_used"] == 0
    assert (sum(stats["preemptions"].values()) > 0) == pressure
    gc.collect()


@pytest.mark.timeout(300)
def test_half_of_the_block_steps_of_separate_requests(entries, default_model_dir):
    """Four beams share their prompt and much of what they say; four requests share nothing."""
    chosen = [entry for entry in entries if entry["beam_width"] == 4][:3]

    def block_steps(engine, asked):
        before = engine.stats()["block_steps"]
        for prompts, params in asked:
            engine.generate(prompts, params)
        return engine.stats()["block_steps"] - before

    with Engine(num_blocks=400, max_num_seqs=16, prefix_cache=False) as engine:
        beams = block_steps(engine, [([entry["prompt_ids"]], params_of(entry)) for entry in chosen])
        plain = SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True)
        separate = block_steps(engine, [([entry["prompt_ids"]] * 4, plain) for entry in chosen])
    assert np.isfinite(beams)
    assert beams <= 0.5 * separate, (beams, separate)
    gc.collect()
