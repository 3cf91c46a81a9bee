"""What experience says against how a system is set up: reason and remedy, never a refusal.

Owns the form of advice and what can be said before anything runs. What only a running system shows is `guards.py`'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

BLOCK_SIZES = (16, 32)
UTILIZATION_MAX = 0.95


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding. `code` is stable, for programs."""

    code: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """JSON-able."""
        return asdict(self)


def setup_advice(*, block_size: int, gpu_memory_utilization: float) -> tuple[Advice, ...]:
    """What is unwise about options, whatever will run."""
    found = []
    if block_size not in BLOCK_SIZES:
        small = block_size < min(BLOCK_SIZES)
        costs = (
            "small blocks make long block tables and many small reads"
            if small
            else "large blocks leave memory empty at the end of every sequence and share fewer prefixes"
        )
        found.append(
            Advice("block_size", f"block_size is {block_size}, and {costs}", "set block_size to 16 or 32")
        )
    if gpu_memory_utilization > UTILIZATION_MAX:
        found.append(
            Advice(
                "gpu_memory_utilization",
                f"gpu_memory_utilization is {gpu_memory_utilization:g}, which leaves nothing for fragmentation and "
                "the driver, so the device runs out of memory sooner or later",
                f"set gpu_memory_utilization to at most {UTILIZATION_MAX:g}",
            )
        )
    return tuple(found)
