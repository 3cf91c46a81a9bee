"""`octavo replay`: every decision of a recorded run made again, and the run beside its simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cluster.cli.console import EXIT_FAILED, JsonOption, print_json, reports_errors


@reports_errors
def replay(
    recording: Annotated[Path, typer.Argument(help="Written by `octavo serve --record FILE`.")],
    *,
    simulate: Annotated[
        bool, typer.Option(help="Also simulate the same arrivals and tell how far the times are off.")
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Speed of the simulated workers: a JSON file, or a shipped one by name. Default: fitted to this run."
        ),
    ] = None,
    save_calibration: Annotated[
        Path | None, typer.Option(help="Write the speed fitted to this run here.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make every decision of a recorded run again and compare; exits 1 when one differs."""
    from octavo.cluster.recording import read_recording
    from octavo.cluster.replay import replay as play
    from octavo.cluster.simulator.calibration import calibrate, read_calibration, write_calibration
    from octavo.cluster.simulator.live import beside

    found = play(read_recording(recording))
    result: dict[str, Any] = {
        "steps": found.num_steps,
        "steps_same": found.num_steps_same,
        "routed": found.num_routed,
        "routed_same": found.num_routed_same,
        "others": found.num_others,
        "others_same": found.num_others_same,
        "differences": found.differences,
    }
    if save_calibration is not None:
        write_calibration(calibrate(found, recording.stem), save_calibration)
    if simulate:
        device = read_calibration(calibration) if calibration else calibrate(found, recording.stem)
        live, simulated = beside(found, device, recording.name)
        result |= {
            "live": live.as_dict(),
            "simulated": simulated.as_dict(),
            "simulated_off_by": live.off(simulated),
        }
    if json:
        print_json(result)
    else:
        _print(result)
    if not found.same:
        raise typer.Exit(EXIT_FAILED)


def _print(result: dict[str, Any]) -> None:
    for name, what in (
        ("steps", "steps"),
        ("routed", "choices of a worker"),
        ("others", "results, ends and looks at the clock"),
    ):
        print(f"{result[f'{name}_same']} of {result[name]} {what} came out the same")
    for difference in result["differences"]:
        print(f"  {difference}")
    if "live" not in result:
        return
    print(f"{'':12} {'live':>9} {'simulated':>9} {'off by':>8}")
    for name, off in result["simulated_off_by"].items():
        print(f"{name:12} {result['live'][name]:9.4f} {result['simulated'][name]:9.4f} {off:+8.1%}")
