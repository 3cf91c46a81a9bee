"""One device: block pool, model, sampler, step execution, gRPC service, the Ray worker actor."""

import os

# OpenMP's threads spin for milliseconds after each parallel loop, hoping for the next. With two workers, or anything
# else, on the same cores they spin in the way of those who have work: a prefill was measured to take ten times as
# long. A short spin still bridges the gaps within a step. libgomp reads this once, when torch loads it.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "5000"

# A KV block lies anywhere, and with pages of 4 KiB each one costs a walk through the page tables, which decodes wait
# for. torch then asks for huge pages wherever it allocates 2 MiB or more. It reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
