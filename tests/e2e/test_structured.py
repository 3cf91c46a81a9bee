"""Structured output from end to end: equal to Hugging Face held to the same grammar, whatever happens on the way.

A tiny random model with the default model's tokenizer: it has no wish to write JSON, so whatever matches was enforced.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import xgrammar

from octavo import Engine, SamplingParams, StructuredOutput
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos.errors import InvalidRequestError
from octavo.worker.vocabulary import read_vocabulary

from .support import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

VOCAB, EOS, MAX_TOKENS = 49152, 2, 80
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "age", "names"],
    "additionalProperties": False,
}
LINES = "([a-z]{1,9} [0-9]{1,3}\n){4,9}"
WANTED = {
    "schema": StructuredOutput.json_schema(SCHEMA),
    "regex": StructuredOutput.regex(LINES),
    "choice": StructuredOutput.choice(["the first one", "the second one"]),
    "grammar": StructuredOutput.grammar('root ::= "(" root ")" | [a-f]{2,4}'),
}
PROMPTS = ["An animal is", "Tell me about the sea.", "x", "One, two, three, four, five, six, seven, eight"]


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Any, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    shutil.copytree(tiny_model_dir("llama", vocab_size=VOCAB), folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_dir / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    with Engine(str(model_dir), device="cpu", num_blocks=512, max_num_seqs=32) as engine:
        yield engine


def assert_matches(name: str, text: str) -> None:
    if name == "schema":
        value = json.loads(text)
        assert list(value) == ["kind", "age", "names"]
        assert value["kind"] in ("cat", "dog")
        assert 0 <= value["age"] <= 99
        assert 1 <= len(value["names"]) <= 3
    elif name == "regex":
        assert re.fullmatch(LINES, text)
    elif name == "choice":
        assert text in ("the first one", "the second one")
    else:
        assert re.fullmatch(r"\(*[a-f]{2,4}\)*", text)
        assert text.count("(") == text.count(")")


def test_greedy_equals_hugging_face_held_to_the_same_grammar(engine: Engine, model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, LogitsProcessor

    vocabulary = read_vocabulary(model_dir, VOCAB, (EOS,))
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(
            list(vocabulary.tokens), xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS]
        )
    )
    compiled = {
        "schema": compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False),
        "regex": compiler.compile_regex(LINES),
        "choice": compiler.compile_grammar('root ::= "the first one" | "the second one"'),
        "grammar": compiler.compile_grammar(WANTED["grammar"].text),
    }

    class Held(LogitsProcessor):
        def __init__(self, name: str, num_prompt_tokens: int) -> None:
            self.matcher = xgrammar.GrammarMatcher(compiled[name])
            self.num_seen = num_prompt_tokens

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for token in input_ids[0, self.num_seen :].tolist():
                assert self.matcher.accept_token(token)
            self.num_seen = input_ids.shape[1]
            words = np.zeros((1, VOCAB // 32), np.int32)
            self.matcher.fill_next_token_bitmask(words, 0)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for name, wanted in WANTED.items():
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_output=wanted)
        outputs = engine.generate(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = torch.tensor([engine.tokenizer.encode(prompt)])
            reference = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=EOS,
                pad_token_id=0,
                logits_processor=[Held(name, ids.shape[1])],
            )[0, ids.shape[1] :].tolist()
            (found,) = output.outputs
            assert list(found.token_ids) == reference, (name, prompt)
            assert found.finish_reason == "stop"
            assert_matches(name, found.text)


@pytest.mark.parametrize("name", WANTED)
def test_samples_match_with_everything_else_that_bends_logits(engine: Engine, name: str) -> None:
    params = SamplingParams(
        temperature=1.5,
        top_k=20,
        top_p=0.95,
        n=4,
        seed=5,
        presence_penalty=1.0,
        logit_bias={EOS: 5.0, 100: 100.0},
        logprobs=2,
        max_tokens=300,
        structured_output=WANTED[name],
    )
    (output,) = engine.generate(PROMPTS[:1], params)
    for branch in output.outputs:
        assert branch.finish_reason == "stop"
        assert_matches(name, branch.text)
    if name != "choice":
        assert len({branch.text for branch in output.outputs}) == 4
    # Log-probabilities are the model's own, which would have had it otherwise.
    first = output.outputs[0].logprobs
    assert first is not None
    assert any(entry.logprob < min(entry.top_logprobs) for entry in first if entry is not None)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_is_invisible(engine: Engine, model_dir: Path, preemption: str) -> None:
    each = [
        SamplingParams(
            temperature=1.0,
            n=2,
            seed=index,
            max_tokens=100,
            structured_output=list(WANTED.values())[index % 2],
        )
        for index in range(12)
    ]
    prompts = [f"{PROMPTS[index % 4]} {index}" for index in range(12)]
    calm = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    with Engine(
        str(model_dir), device="cpu", num_blocks=24, host_blocks=64, max_num_seqs=32, preemption=preemption
    ) as small:
        pressed = small.generate(prompts, each)
        stats = small.stats()
        small.check_integrity()
    assert stats["preemptions"][preemption] > 0
    for alone, together in zip(calm, pressed, strict=True):
        assert [branch.token_ids for branch in alone.outputs] == [
            branch.token_ids for branch in together.outputs
        ]


def test_an_engine_refuses_before_anything_runs(engine: Engine) -> None:
    before = engine.stats()["steps"]
    with pytest.raises(InvalidRequestError, match="regex"):
        engine.generate(PROMPTS, SamplingParams(structured_output=StructuredOutput.regex("(")))
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_output=WANTED["regex"])
    with pytest.raises(InvalidRequestError, match="beam_width"):
        SamplingParams(beam_width=2, temperature=0, structured_output=WANTED["regex"])
    assert engine.stats()["steps"] == before


def test_the_other_backend_holds_too(model_dir: Path) -> None:
    params = {
        name: SamplingParams(temperature=1.0, seed=3, max_tokens=300, structured_output=wanted)
        for name, wanted in WANTED.items()
    }
    with Engine(str(model_dir), device="cpu", num_blocks=512, guided_backend="llguidance") as engine:
        for name, output in zip(
            params, engine.generate(["x"] * len(params), list(params.values())), strict=True
        ):
            assert output.outputs[0].finish_reason == "stop"
            assert_matches(name, output.outputs[0].text)


def test_over_http_and_grpc(model_dir: Path) -> None:
    from octavo.worker.build import build_executor
    from octavo.worker.config import WorkerConfig

    executor = build_executor(
        WorkerConfig(
            worker_id="worker-0", model=str(model_dir), device="cpu", num_blocks=200, max_num_seqs=16
        )
    )
    tokenizer = Tokenizer(model_dir)
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}

    async def test() -> None:
        async with served(executor, tokenizer) as system, httpx.AsyncClient(base_url=system.url) as client:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "An animal is", "temperature": 0, "max_tokens": 200, **fields}
                return await client.post("/v1/completions", json=body, timeout=60)

            replies = await asyncio.gather(
                ask(response_format=form),
                ask(response_format=form, n=2, temperature=1),
                ask(guided_regex="(a"),
            )
            for choice in [*replies[0].json()["choices"], *replies[1].json()["choices"]]:
                assert choice["finish_reason"] == "stop"
                assert_matches("schema", choice["text"])
            assert replies[2].status_code == 400
            assert replies[2].json()["error"]["param"] == "guided_regex"
            await system.idle_stats()

    asyncio.run(asyncio.wait_for(test(), 120))
    tokenizer.close()
