"""Writes tests/data/golden.json and golden_long.json: what Hugging Face `generate` answers to the project's prompts.

Greedy, float32, one prompt at a time, end-of-sequence treated as any other token. Beside each token stands the
margin, top-1 minus top-2 log-probability in nats, that rule R1 needs to tell a near tie from a wrong answer. Run it
again only when the default model or the prompts change; it takes about ten minutes on two cores.

golden_long.json is one answer to 3,000 tokens (the texts of the prompt file, one after the other), with the largest
logits of each position, so that a test of long contexts need not run the reference again (case D26).

beams.json has what `generate(num_beams=...)` answers to sixteen of the prompts: all returned sequences and scores.

    python tests/make_golden.py [--only beams]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from octavo.worker import default_model

DATA = Path(__file__).parent / "data"
NEW_TOKENS = 48
LONG_PROMPTS, LONG_NEW_TOKENS = 10, 100
"""The first so many prompts are continued for longer."""
BEAM_NEW_TOKENS, BEAM_PROMPT_TOKENS_MAX = 32, 160
BEAM_SETTINGS = (
    {"beam_width": 4, "n": 4, "length_penalty": 1.0, "early_stopping": False},
    {"beam_width": 4, "n": 2, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 3, "n": 3, "length_penalty": 2.0, "early_stopping": False},
    {"beam_width": 4, "n": 4, "length_penalty": 1.0, "early_stopping": True},
)
"""Taken in turn by sixteen prompts."""
CONTEXT_TOKENS, CONTEXT_NEW_TOKENS, CONTEXT_TOP_LOGITS = 3000, 64, 16


def answer(model: Any, prompt_ids: list[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return `new_tokens` greedy ids and the logits they were chosen from, float32 [new_tokens, vocab]."""
    inputs = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
    ids = out.sequences[0, len(prompt_ids) :].tolist()
    assert len(ids) == new_tokens, "an end-of-sequence id was obeyed"
    return ids, torch.cat(out.logits)


def margins(logits: torch.Tensor) -> list[float]:
    """Top-1 minus top-2 log-probability of each row, in nats."""
    top = logits.double().topk(2).values
    return [round(margin, 6) for margin in (top[:, 0] - top[:, 1]).tolist()]


def make_golden(model: Any, prompts: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    """One entry for each (id, prompt ids)."""
    entries = []
    start = time.monotonic()
    for index, (name, prompt_ids) in enumerate(prompts):
        ids, logits = answer(model, prompt_ids, LONG_NEW_TOKENS if index < LONG_PROMPTS else NEW_TOKENS)
        entries.append(
            {
                "id": name,
                "num_prompt_tokens": len(prompt_ids),
                "prompt_ids_sha256": hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).hexdigest(),
                "token_ids": ids,
                "margins": margins(logits),
            }
        )
        print(f"{index + 1}/{len(prompts)} {name} {time.monotonic() - start:.0f} s", file=sys.stderr)
    return entries


def make_long(model: Any, prompts: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    """The entry for one long context."""
    prompt_ids = [token for name, ids in prompts if name.startswith("text") for token in ids][:CONTEXT_TOKENS]
    ids, logits = answer(model, prompt_ids, CONTEXT_NEW_TOKENS)
    top = logits.topk(CONTEXT_TOP_LOGITS)
    return [
        {
            "id": f"context-{CONTEXT_TOKENS}",
            "prompt_ids": prompt_ids,
            "token_ids": ids,
            "margins": margins(logits),
            "top_ids": top.indices.tolist(),
            "top_logits": [[round(value, 5) for value in row] for row in top.values.tolist()],
        }
    ]


def make_beams(model: Any, prompts: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    """One entry for each of sixteen short prompts; the model's end-of-sequence id is obeyed."""
    eos = AutoTokenizer.from_pretrained(default_model.default_model_dir()).eos_token_id
    short = [(name, ids) for name, ids in prompts if len(ids) <= BEAM_PROMPT_TOKENS_MAX]
    step = len(short) // 16
    entries = []
    for index, (name, prompt_ids) in enumerate(short[::step][:16]):
        settings = BEAM_SETTINGS[index % len(BEAM_SETTINGS)]
        inputs = torch.tensor([prompt_ids])
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=GenerationConfig(
                    do_sample=False,
                    num_beams=settings["beam_width"],
                    num_return_sequences=settings["n"],
                    length_penalty=settings["length_penalty"],
                    early_stopping=settings["early_stopping"],
                    max_new_tokens=BEAM_NEW_TOKENS,
                    eos_token_id=eos,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_scores=True,
                ),
            )
        sequences = [
            ids[: ids.index(eos) + 1] if eos in ids else ids
            for ids in out.sequences[:, len(prompt_ids) :].tolist()
        ]
        entries.append(
            {
                "id": name,
                **settings,
                "max_tokens": BEAM_NEW_TOKENS,
                "prompt_ids": prompt_ids,
                "sequences": sequences,
                "scores": [round(score, 6) for score in out.sequences_scores.tolist()],
            }
        )
        print(f"beams {index + 1}/16 {name}", file=sys.stderr)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("golden", "golden_long", "beams"), help="make one of the files")
    only = parser.parse_args().only
    folder = default_model.default_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # the model's own would put its end-of-sequence id back
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [(p["id"], tokenizer(p["prompt"]).input_ids) for p in map(json.loads, lines)]
    made_with = {
        "model": default_model.NAME,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name, make in (("golden", make_golden), ("golden_long", make_long), ("beams", make_beams)):
        if only in (None, name):
            rows = ",\n".join(json.dumps(entry) for entry in make(model, prompts))
            text = f'{{"made_with": {json.dumps(made_with)},\n"entries": [\n{rows}\n]}}\n'
            (DATA / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
