"""What a plan comes to once it has been checked and booked: the step's inputs, and what is to be sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.protos.types import Int32Array
from octavo.worker.prompt_rows import PromptRows
from octavo.worker.sampler import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class FlatInputs:
    """One step's model input; names, shapes and dtypes as in `forward_batch.ForwardBatch`, but numpy."""

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    block_tables: Int32Array
    cu_seqlens_q: Int32Array
    context_lens: Int32Array
    logit_rows: npt.NDArray[np.int64]
    late_places: npt.NDArray[np.int64]
    """[P] indices into `input_ids` of tokens that the step before is still sampling"""
    late_samples: npt.NDArray[np.int64]
    """[P] and which of its samples they are"""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """What is left to do of a plan that has been checked and booked."""

    inputs: FlatInputs | None
    """None: no row runs."""
    sampling: SamplingBatch | None
    """None: no row samples."""
    samples: npt.NDArray[np.int64]
    """[K'] indices into the plan's `sample_rows` of those that sample; the others had ended. Aligned with
    `sampling`."""
    sample_rows: Int32Array
    """[K'] their rows."""
    sample_positions: Int32Array
    """[K'] where in their sequences the samples will stand."""
    prompts: PromptRows | None = None
    """Prompt tokens whose log-probabilities are asked for; None: nobody asks."""
