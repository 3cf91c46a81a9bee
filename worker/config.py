"""What a worker is told at start. Frozen and checked; what it finds out itself is `WorkerInfo`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protos.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
TOKEN_BUDGETS = {"cpu": 256, "cuda": 512}
"""Tokens of one step where nobody says otherwise. 256 keep two CPU cores busy, and twice as many would make running
requests wait twice as long beside a long prompt (docs/performance.md, W3)."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
GUIDED_BACKENDS = ("xgrammar", "llguidance")
"""Of structured output: which library compiles what an output must match."""
QUANTIZATIONS = ("fp16", "int8")
"""Of the weights of matrix products, on a CPU: `worker.linears` says what each does, docs/performance.md what it costs
in quality."""
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
"""Of the KV cache: the model's, or a byte a number with a scale for each block and head (docs/kernels.md)."""
GPU_MEMORY_UTILIZATION_MAX = 0.95
"""Above this, fragmentation and the driver's own needs run a device out of memory sooner or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of one worker. Raises `ConfigError` naming the option (`param`) and what it accepts."""

    worker_id: str
    model: str | None = None
    """None: the default model; else a folder, a .gguf file or a hub id."""
    device: str = "auto"
    """"auto": CUDA if there is a device, else the CPU. "cuda:1" picks one."""
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    """None: from free memory."""
    num_host_blocks: int | None = None
    """Swap space in host memory. None: 10 % of available memory, but no more blocks than the device has; 0: none, and
    requests that give way are computed again."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    """None: the model's."""
    gpu_memory_utilization: float = 0.90
    """Share of the device's memory for weights, KV cache and steps together."""
    allow_high_gpu_memory_utilization: bool = False
    """Lets the share go above 0.95, up to 1."""
    num_threads: int | None = None
    """Of the CPU; None: as many as this process may run on."""
    quantization: str | None = None
    guided_backend: str = "xgrammar"
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.worker_id, str) or not self.worker_id:
            raise ConfigError(f"worker_id must be a name, got {self.worker_id!r}", param="worker_id")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"model must be a path, a hub id or None, got {self.model!r}", param="model")
        self._check_device()
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", param="dtype")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            accepted = ", ".join(("None", *QUANTIZATIONS))
            raise ConfigError(
                f"quantization must be one of: {accepted}; got {self.quantization!r}", param="quantization"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}",
                param="kv_cache_dtype",
            )
        if self.guided_backend not in GUIDED_BACKENDS:
            raise ConfigError(
                f"guided_backend must be one of {', '.join(GUIDED_BACKENDS)}, got {self.guided_backend!r}",
                param="guided_backend",
            )
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._check_count(name)
        for name in ("num_blocks", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                self._check_count(name)
        if self.num_host_blocks is not None:
            self._check_count("num_host_blocks", at_least=0)
        self._check_utilization()

    def _check_device(self) -> None:
        kind, _, index = str(self.device).partition(":")
        indexed = kind == "cuda" and index.isdecimal()
        if not (self.device in DEVICES or indexed):
            raise ConfigError(
                f"device must be one of {', '.join(DEVICES)} or cuda:N, got {self.device!r}", param="device"
            )

    def _check_count(self, name: str, *, at_least: int = 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**31:
            raise ConfigError(f"{name} must be an integer of at least {at_least}, got {value!r}", param=name)

    def _check_utilization(self) -> None:
        value, name = self.gpu_memory_utilization, "gpu_memory_utilization"
        # Written so that NaN, which compares false to everything, is refused too.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
            raise ConfigError(f"{name} must be above 0 and at most 1, got {value!r}", param=name)
        if value > GPU_MEMORY_UTILIZATION_MAX and not self.allow_high_gpu_memory_utilization:
            raise ConfigError(
                f"{name} {value:g} is above {GPU_MEMORY_UTILIZATION_MAX} and would run out of memory sooner or "
                "later; set allow_high_gpu_memory_utilization to insist",
                param=name,
            )
