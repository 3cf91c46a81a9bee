"""What the scheduler is told once: frozen, validated, and never read from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.protos.errors import ConfigError

PREEMPTION_MODES = ("auto", "swap", "recompute")
"""`auto` prices every victim; the others force one way, as far as it is possible."""
VICTIM_RULES = ("least_lost", "youngest")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one worker's scheduler. Raises `ConfigError` naming the option."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    """Branches that may run at once; each has a row on the worker."""
    max_num_batched_tokens: int = 512
    """The token budget of one step."""
    max_model_len: int = 8192
    """Prompt plus output tokens of one branch."""
    pipeline_depth: int = 2
    """Plans that may be out before the first result is in."""
    preemption: str = "auto"
    victims: str = "least_lost"
    num_host_blocks: int = 0
    """Blocks of the host pool; 0: parked requests are computed again."""
    kv_bytes_per_block: int = 0
    """All layers, K and V; what swapping a block moves."""
    host_link_bytes_per_second: float = 0.0
    """Measured by the worker at start; 0: unknown, and `auto` then never swaps."""
    host_tier: bool = True
    """Blocks of prefixes that leave the device go to host blocks that no parked request needs, where loading them
    again is sooner than computing them."""
    prefix_cache: bool = True
    itl_target: float | None = None
    """Seconds a step may take; the budget of each step follows from it through the StepTimeModel."""
    max_waiting: int = 4096
    """Requests that may queue; one more is an `OverloadedError`."""
    max_waiting_tokens: int = 4_000_000
    """Prompt tokens of all that queue together; more is an `OverloadedError`, unless the queue is empty."""
    priority_aging_seconds: float = 60.0
    """Waiting so long is worth one step of priority, so that nobody waits for ever; infinity: never."""
    epoch: int = 1
    """Who plans; goes into every plan (fencing)."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "pipeline_depth",
            "max_waiting",
            "max_waiting_tokens",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}", param=name)
        for name, choices in (("preemption", PREEMPTION_MODES), ("victims", VICTIM_RULES)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}", param=name
                )
        for name in ("num_host_blocks", "kv_bytes_per_block", "host_link_bytes_per_second"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}", param=name)
        if self.preemption == "swap" and not self.num_host_blocks:
            raise ConfigError("preemption 'swap' needs host blocks, and host_blocks is 0", param="preemption")
        if not self.priority_aging_seconds > 0:
            raise ConfigError(
                f"priority_aging_seconds must be above 0, got {self.priority_aging_seconds!r}",
                param="priority_aging_seconds",
            )
        if self.itl_target is not None and not 0 < self.itl_target < float("inf"):
            raise ConfigError(
                f"itl_target must be a number of seconds above 0, got {self.itl_target!r}", param="itl_target"
            )

    @property
    def max_pool_tokens(self) -> int:
        """Tokens that the whole pool holds: no single request can have KV for more."""
        return self.num_blocks * self.block_size
