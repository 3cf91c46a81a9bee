"""What `--quantization` and `--kv-cache-dtype` cost in quality, against float32 on the same text.

    python benchmarks/quantization.py [--prompts examples/prompts.jsonl] [--max-prompts 16] [--max-tokens 256]

The text is the last message, or the prompt, of each line of a batch file. It is fed in chunks of 128 tokens and then,
its last 32 tokens, one by one, as answers are: of a quantised cache later tokens read what earlier ones left, and a
block's bytes depend on how it was filled. Printed for each form of the weights and of the cache: perplexity of the
text, at how many positions the likeliest token is float32's, and how far from float32's the log-probabilities of the
text's own tokens are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from octavo.cluster.tokenizer import Tokenizer
from octavo.kernels.dispatch import QUANTISED
from octavo.worker.accelerate import accelerate
from octavo.worker.kv_pool import KVPool, KVShape
from octavo.worker.loader import LoadedModel, load_model, resolve_model
from octavo.worker.model import ModelRunner
from octavo.worker.warmup import made_up_batch

BLOCK_SIZE = 16
CHUNK_TOKENS = 128
DECODED_TOKENS = 32
FORMS = [(None, "auto"), ("fp16", "auto"), ("int8", "auto"), (None, "fp8"), (None, "int8")]
PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"


def texts(path: Path) -> list[str]:
    bodies = [json.loads(line)["body"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        for body in bodies
        if "messages" in body or isinstance(body["prompt"], str)
    ]


@torch.inference_mode()
def logits_of(loaded: LoadedModel, decoder: Any, ids: list[int], kv_cache_dtype: str) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    shape = KVShape(
        num_layers=loaded.shape.num_layers,
        num_kv_heads=loaded.shape.num_kv_heads,
        head_dim=loaded.shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=QUANTISED.get(kv_cache_dtype, loaded.dtype),
    )
    pool = KVPool(shape, num_blocks=-(-len(ids) // BLOCK_SIZE), device=loaded.device)
    runner = ModelRunner(loaded, pool.layers, decoder)
    chunks_end = max(1, len(ids) - DECODED_TOKENS)
    starts = [*range(0, chunks_end, CHUNK_TOKENS), *range(chunks_end, len(ids))]
    found = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        batch = made_up_batch(
            [(start, end - start)],
            block_size=BLOCK_SIZE,
            vocab_size=loaded.shape.vocab_size,
            device=loaded.device,
        )
        batch = dataclasses.replace(
            batch, input_ids=torch.tensor(ids[start:end]), logit_rows=torch.arange(end - start)
        )
        found.append(runner.forward(batch))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256, help="of each text")
    args = parser.parse_args()
    source = resolve_model(args.model)
    tokenizer = Tokenizer(source.tokenizer_dir)
    encoded = [list(tokenizer.encode(text))[: args.max_tokens] for text in texts(args.prompts)]
    encoded = sorted(encoded, key=len, reverse=True)[: args.max_prompts]
    print(f"{len(encoded)} texts, {sum(map(len, encoded))} tokens")
    reference: tuple[torch.Tensor, torch.Tensor] | None = None
    for quantization, kv_cache_dtype in FORMS:
        loaded = load_model(source, device=torch.device("cpu"), dtype="float32")
        decoder = accelerate(loaded, quantization=quantization)
        own, best = [], []
        for ids in encoded:
            logits = logits_of(loaded, decoder, ids, kv_cache_dtype)[:-1]
            own.append(logits.log_softmax(dim=1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
            best.append(logits.argmax(dim=1))
        logprobs, tokens = torch.cat(own), torch.cat(best)
        reference = reference or (logprobs, tokens)
        print(
            f"weights {quantization or 'fp32'}, KV cache {kv_cache_dtype}: perplexity "
            f"{math.exp(-logprobs.mean()):.3f}, likeliest token equal at "
            f"{100 * (tokens == reference[1]).float().mean():.2f} %, log-probability off by "
            f"{(logprobs - reference[0]).abs().mean():.4f} nats on average",
            flush=True,
        )


if __name__ == "__main__":
    main()
