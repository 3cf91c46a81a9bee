"""The requests of the serving benchmark, W1 to W5: token ids cut from GSM8K's text, the same ones every time.

    python benchmarks/workloads.py --gsm8k gsm8k_test.jsonl --model MODEL_FOLDER      counts of each

| W1 | 48 requests, prompts of 32 to 384 tokens, 16 to 128 outputs, all at once |
| W2 | 24 requests: one prefix of 768 tokens, 32 own, 16 outputs; cold, again, and with new tails |
| W3 | 6 streams (32 + 96); once each has 16 tokens, a prompt of 1,800 with 8 outputs arrives |
| W4 | one prompt of 512 tokens, 8 samples of 48 tokens, temperature 0.8 |
| W5 | one stream, 64 + 128 |

All but W4 are greedy; none ends early. A repetition has the same lengths and other text, so that no cache helps from
one to the next. Needs `tokenizers`, the model's tokenizer.json and the test set of GSM8K (MIT), which is not shipped.
Knows no engine: peers use it from environments of their own.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 20261130
MAX_REPETITIONS = 4


@dataclass(frozen=True)
class BenchRequest:
    id: str
    prompt: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Workloads:
    """One repetition."""

    w1: list[BenchRequest]
    w2: list[BenchRequest]
    w2_new_tails: list[BenchRequest]
    w3_streams: list[BenchRequest]
    w3_long: BenchRequest
    w4: BenchRequest
    w5: BenchRequest
    warm_up: list[BenchRequest]


class _Text:
    """An endless supply of token ids: whole problems in a shuffled order, what a cut leaves over is dropped."""

    def __init__(self, problems: list[list[int]], seed: int) -> None:
        order = list(range(len(problems)))
        random.Random(seed).shuffle(order)
        self._problems: Iterator[list[int]] = (problems[index] for index in order)

    def take(self, count: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < count:
            ids += next(self._problems)
        return ids[:count]

    def tails(self, count: int, length: int) -> list[list[int]]:
        """Pieces that differ from their first token on, so that no prefix cache joins them."""
        by_first: dict[int, list[int]] = {}
        while len(by_first) < count:
            piece = self.take(length)
            if piece[0] in by_first:
                piece = piece[1:] + piece[:1]
            by_first.setdefault(piece[0], piece)
        return list(by_first.values())


def build(gsm8k: Path, model: Path, repetition: int) -> Workloads:
    """The requests of one repetition, 0 to `MAX_REPETITIONS` - 1."""
    from tokenizers import Tokenizer

    problems = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    texts = [f"{problem['question']}\n{problem['answer']}\n\n" for problem in problems]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = _Text(
        [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)],
        SEED + 1 + repetition,
    )
    # Lengths are the same in all repetitions. Text is taken in a fixed order: each piece depends on those before.
    lengths = random.Random(SEED)
    w1_lengths = [(lengths.randint(32, 384), lengths.randint(16, 128)) for _ in range(48)]
    prefix = text.take(768)
    tails, new_tails = text.tails(24, 32), text.tails(24, 32)
    return Workloads(
        w1=[
            BenchRequest(f"w1-{index}", text.take(prompt), outputs)
            for index, (prompt, outputs) in enumerate(w1_lengths)
        ],
        w2=[BenchRequest(f"w2-{index}", prefix + tail, 16) for index, tail in enumerate(tails)],
        w2_new_tails=[
            BenchRequest(f"w2-new-{index}", prefix + tail, 16) for index, tail in enumerate(new_tails)
        ],
        w3_streams=[BenchRequest(f"w3-{index}", text.take(32), 96) for index in range(6)],
        w3_long=BenchRequest("w3-long", text.take(1800), 8),
        w4=BenchRequest("w4", text.take(512), 48, n=8, temperature=0.8, seed=1234 + repetition),
        w5=BenchRequest("w5", text.take(64), 128),
        warm_up=[BenchRequest(f"warm-{index}", text.take(20 + 90 * index), 8) for index in range(4)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    args = parser.parse_args()
    for name, value in vars(build(args.gsm8k, args.model, 0)).items():
        requests = value if isinstance(value, list) else [value]
        prompt = sum(len(request.prompt) for request in requests)
        print(name, len(requests), "requests,", prompt, "prompt tokens,", end=" ")
        print(sum(request.n * request.max_tokens for request in requests), "output tokens")


if __name__ == "__main__":
    main()
