"""One device: block pool, model, sampler, step execution, gRPC service, the Ray worker actor."""

import os

# OpenMP's threads spin for milliseconds after each parallel loop, hoping for the next. With two workers, or anything
# else, on the same cores they spin in the way of those who have work: a prefill was measured to take ten times as
# long. A short spin still bridges the gaps within a step. libgomp reads this once, when torch loads it.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "5000"
