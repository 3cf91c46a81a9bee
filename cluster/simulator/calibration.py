"""A measured machine: a step-time model fitted to the steps of a recorded run, and the files that keep such fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np

from octavo.cluster.replay import MeasuredStep, Replay
from octavo.cluster.simulator.hardware import Device
from octavo.protos.errors import ConfigError, InvalidRequestError

STEPS_MIN = 50
_SHIPPED = Path(__file__).parent / "calibrations"


def shipped() -> list[str]:
    """Names of the machines whose calibrations come with Octavo."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def read_calibration(name: str) -> Device:
    """A file with the fields of `Device`, or one of `shipped`. Raises `ConfigError` naming what is wrong."""
    path = _SHIPPED / f"{name}.json" if name in shipped() else Path(name)
    try:
        return Device(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{name} is no calibration: {error}; shipped are {', '.join(shipped())}", param="calibration"
        ) from None


def write_calibration(device: Device, path: Path) -> None:
    path.write_text(json.dumps(asdict(device), indent=2) + "\n", encoding="utf-8")


def calibrate(found: Replay, name: str) -> Device:
    """The workers of a recorded run, taken as alike. Raises `InvalidRequestError` for a run of too few steps."""
    if len(found.steps) < STEPS_MIN:
        raise InvalidRequestError(
            f"the recording has {len(found.steps)} steps of known duration; a calibration takes at least {STEPS_MIN}",
            param="recording",
        )
    config = found.schedulers[0].config
    fixed, token, row, context = fit(found.steps)
    return Device(
        name=name,
        source="measured",
        fixed_seconds=fixed,
        token_seconds=token,
        row_seconds=row,
        context_token_seconds=context,
        kv_bytes_per_token=config.kv_bytes_per_block // config.block_size,
        kv_tokens=config.num_blocks * config.block_size,
        host_link_bytes_per_second=config.host_link_bytes_per_second,
    )


def fit(steps: Sequence[MeasuredStep]) -> tuple[float, float, float, float]:
    """Seconds a step, a token, a row and a context token: least squares, none negative.

    With four unknowns the best set of those above zero is found by trying all (Lawson and Hanson, Solving Least
    Squares Problems, chapter 23, say how one must for many).
    """
    features = np.array([(1.0, one.num_tokens, one.num_rows, one.context_tokens) for one in steps])
    seconds = np.array([one.seconds for one in steps])
    scale = np.maximum(features.max(axis=0), 1.0)
    best, least = np.zeros(4), float("inf")
    for count in range(1, 5):
        for chosen in combinations(range(4), count):
            columns = list(chosen)
            found = np.linalg.lstsq(features[:, columns] / scale[columns], seconds, rcond=None)[0]
            error = float(np.square(features[:, columns] / scale[columns] @ found - seconds).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[columns] = found / scale[columns]
    fixed, token, row, context = best.tolist()
    return fixed, token, row, context
