"""Is a request that gives way better swapped or computed again?

    python benchmarks/preemption_crossover.py [--json]

First-order arithmetic, nothing is measured: for well-known model shapes, host links and GPUs, the bandwidth from
which swapping is the cheaper way, and how much cheaper it is (or dearer) on that link at several lengths. All inputs
are constants of this file and are printed; `docs/preemption.md` derives the formulas. On a machine at hand the worker
measures link and prefill rate itself, and the scheduler prices with those.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

KV_BYTES_PER_ELEMENT = 2
"""bfloat16."""
LENGTHS = (1_024, 8_192, 65_536)


@dataclass(frozen=True)
class ModelShape:
    """What prices depend on; figures are those of each model's published configuration."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES_PER_ELEMENT

    @property
    def num_matrix_params(self) -> int:
        """Weights that every token is multiplied by. Embedding and head are not among them: the one is a look-up,
        the other runs for the last token only."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def recompute_flops(self, num_tokens: int) -> float:
        """A multiplication and an addition for each weight and token, and causal attention: two products over half
        the length on average."""
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * num_tokens / 2
        return num_tokens * (2 * self.num_matrix_params + attention)


@dataclass(frozen=True)
class HostLink:
    name: str
    effective_bytes_per_second: float
    """One direction, of large pinned transfers: about 80 % of the line rate (31.5 and 63 GB/s)."""


@dataclass(frozen=True)
class Gpu:
    name: str
    peak_flops: float
    """Dense bfloat16, as the vendor states it."""
    efficiency: float
    """Share of the peak that a prefill reaches; an assumption."""

    @property
    def effective_flops(self) -> float:
        return self.peak_flops * self.efficiency


MODELS = (
    ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336),
    ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672),
    ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944),
    ModelShape("Mistral-7B", 32, 4096, 32, 8, 128, 14336),
    ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536),
)
SETUPS = (
    (HostLink("PCIe 4.0 x16", 25e9), Gpu("A100", 312e12, 0.5)),
    (HostLink("PCIe 5.0 x16", 50e9), Gpu("H100", 989e12, 0.5)),
)


def swap_seconds(model: ModelShape, link: HostLink, num_tokens: int) -> float:
    """Out and in again."""
    return 2 * num_tokens * model.kv_bytes_per_token / link.effective_bytes_per_second


def recompute_seconds(model: ModelShape, gpu: Gpu, num_tokens: int) -> float:
    return model.recompute_flops(num_tokens) / gpu.effective_flops


def crossover_bytes_per_second(model: ModelShape, gpu: Gpu) -> float:
    """Bandwidth at which both ways cost the same, without the attention term."""
    return model.kv_bytes_per_token * gpu.effective_flops / model.num_matrix_params


def rows() -> list[dict[str, object]]:
    return [
        {
            "model": model.name,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "matrix_params": model.num_matrix_params,
            "link": link.name,
            "gpu": gpu.name,
            "crossover_bytes_per_second": crossover_bytes_per_second(model, gpu),
            "recompute_over_swap": {
                "short": link.effective_bytes_per_second / crossover_bytes_per_second(model, gpu),
                **{
                    str(length): recompute_seconds(model, gpu, length) / swap_seconds(model, link, length)
                    for length in LENGTHS
                },
            },
        }
        for link, gpu in SETUPS
        for model in MODELS
    ]


def print_tables() -> None:
    print("Inputs\n")
    print(
        "| model | layers | hidden | heads | KV heads | head dim | MLP | matrix weights | KV bytes a token |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for m in MODELS:
        print(
            f"| {m.name} | {m.num_layers} | {m.hidden_size} | {m.num_heads} | {m.num_kv_heads} | {m.head_dim} "
            f"| {m.intermediate_size} | {m.num_matrix_params / 1e9:.3g}e9 | {m.kv_bytes_per_token:,} |"
        )
    print()
    for link, gpu in SETUPS:
        print(
            f"{link.name}: {link.effective_bytes_per_second / 1e9:g} GB/s each way. {gpu.name}: "
            f"{gpu.peak_flops / 1e12:g} TFLOP/s peak, {gpu.efficiency:.0%} effective "
            f"= {gpu.effective_flops / 1e12:g}. KV elements of {KV_BYTES_PER_ELEMENT} bytes."
        )
    print("\nRecompute seconds over swap seconds; above 1, swapping is cheaper\n")
    lengths = " | ".join(f"{length:,} tokens" for length in LENGTHS)
    print(f"| link, GPU | model | crossover | short | {lengths} | cheaper |")
    print("|---|---|---|---|" + "---|" * (len(LENGTHS) + 1))
    for row in rows():
        ratios: dict[str, float] = row["recompute_over_swap"]  # type: ignore[assignment]
        choices = {"swap" if ratio > 1 else "recompute" for ratio in ratios.values()}
        cheaper = choices.pop() if len(choices) == 1 else "by length"
        print(
            f"| {row['link']}, {row['gpu']} | {row['model']} | {row['crossover_bytes_per_second'] / 1e9:.3g} GB/s | "  # type: ignore[operator]
            + " | ".join(f"{ratio:.2g}" for ratio in ratios.values())
            + f" | {cheaper} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    if parser.parse_args().json:
        setups = [{"link": asdict(link), "gpu": asdict(gpu)} for link, gpu in SETUPS]
        print(json.dumps({"models": [asdict(m) for m in MODELS], "setups": setups, "rows": rows()}))
    else:
        print_tables()


if __name__ == "__main__":
    main()
