"""What a simulated worker is: a model's shape on a GPU, or a measured machine; both become step-time coefficients.

Presets are computed from data sheets by a roofline and say so in every report: reading the weights once a step at a
share of the memory bandwidth, multiplying at a share of the arithmetic peak, reading KV at the same share of the
bandwidth. The linear model adds what a roofline takes the larger of, so that steps between the two regimes come out
slower than they are, by at most a factor of 2. A measured file has none of these assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protos.errors import ConfigError
from octavo.scheduler.step_time import StepTimeModel

BANDWIDTH_SHARE = 0.8
"""Of the data sheet's memory bandwidth, what large reads reach."""
COMPUTE_SHARE = 0.5
"""Of the data sheet's dense arithmetic peak, what prefill reaches."""
MEMORY_SHARE = 0.9
"""Of the device's memory that is ours (`gpu_memory_utilization`)."""
RESERVE_BYTES = 2 * 2**30
"""Activations and workspace."""
LAUNCH_SECONDS = 10e-6
"""A layer, with CUDA graphs."""
ROW_SECONDS = 5e-6
"""Sampling and bookkeeping of one branch."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides time and memory."""

    name: str
    num_parameters: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """From the data sheet; the price is an assumption that an option replaces."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_second: float
    dense_flops: float
    """bfloat16, without sparsity."""
    host_link_bytes_per_second: float
    dollars_per_hour: float


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 134.5e6, 30, 3, 64),
        ModelShape("qwen2.5-7b", 7.62e9, 28, 4, 128),
        ModelShape("llama-3.1-8b", 8.03e9, 32, 8, 128),
        ModelShape("llama-2-13b", 13.0e9, 40, 40, 128),
        ModelShape("llama-3.1-70b", 70.6e9, 80, 8, 128),
    )
}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l4", 24e9, 300e9, 121e12, 25e9, 0.8),
        Gpu("l40s", 48e9, 864e9, 362e12, 25e9, 1.6),
        Gpu("a100-80gb", 80e9, 2039e9, 312e12, 25e9, 2.0),
        Gpu("h100", 80e9, 3350e9, 989e12, 50e9, 3.0),
        Gpu("h200", 141e9, 4800e9, 989e12, 50e9, 3.8),
    )
}


@dataclass(frozen=True, slots=True)
class Device:
    """One simulated worker's speed and room."""

    name: str
    source: str
    """"roofline" or "measured": stands in every report."""
    fixed_seconds: float
    token_seconds: float
    row_seconds: float
    context_token_seconds: float
    kv_bytes_per_token: int
    kv_tokens: int
    """That the pool holds."""
    host_link_bytes_per_second: float
    dollars_per_hour: float = 0.0

    def step_time(self) -> StepTimeModel:
        return StepTimeModel.of_coefficients(
            self.fixed_seconds, self.token_seconds, self.row_seconds, self.context_token_seconds
        )


def roofline(shape: ModelShape, gpu: Gpu, *, num_gpus: int = 1) -> Device:
    """`num_gpus` share each layer (tensor parallel), without cost for their talk.

    Raises `ConfigError` where the weights leave no room for KV.
    """
    bandwidth = gpu.bandwidth_bytes_per_second * BANDWIDTH_SHARE * num_gpus
    room = gpu.memory_bytes * MEMORY_SHARE * num_gpus - shape.weight_bytes - RESERVE_BYTES * num_gpus
    kv_tokens = int(room // shape.kv_bytes_per_token)
    if kv_tokens < 1:
        raise ConfigError(
            f"{shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights: no room for KV on {num_gpus} {gpu.name} "
            f"of {gpu.memory_bytes / 1e9:.0f} GB",
            param="gpu",
        )
    return Device(
        name=f"{shape.name} on {num_gpus} {gpu.name}",
        source="roofline",
        fixed_seconds=shape.weight_bytes / bandwidth + LAUNCH_SECONDS * shape.num_layers,
        token_seconds=2 * shape.num_parameters / (gpu.dense_flops * COMPUTE_SHARE * num_gpus),
        row_seconds=ROW_SECONDS,
        context_token_seconds=shape.kv_bytes_per_token / bandwidth,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_tokens=kv_tokens,
        host_link_bytes_per_second=gpu.host_link_bytes_per_second * num_gpus,
        dollars_per_hour=gpu.dollars_per_hour * num_gpus,
    )


def preset(model: str, gpu: str, *, num_gpus: int = 1) -> Device:
    """By names. Raises `ConfigError` for one that is unknown, naming those that are known."""
    for name, known, param in ((model, MODELS, "model"), (gpu, GPUS, "gpu")):
        if name not in known:
            raise ConfigError(f"{param} must be one of {', '.join(known)}, got {name!r}", param=param)
    if num_gpus < 1:
        raise ConfigError(f"tp must be at least 1, got {num_gpus}", param="tp")
    return roofline(MODELS[model], GPUS[gpu], num_gpus=num_gpus)
