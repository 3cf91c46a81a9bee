"""`python -m octavo.protos.generate`: writes the stubs of every `.proto` file here, or checks them.

The only place that knows how protoc is called. Imports in the stubs are package-qualified
(`from octavo.protos import common_pb2`) because protoc is shown this folder under that name.
Needs grpcio-tools, which the `dev` extra brings and running Octavo does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROTO_FOLDER = Path(__file__).resolve().parent
IMPORT_PREFIX = "octavo/protos"
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def proto_names() -> list[str]:
    """Names of all `.proto` files here, without suffix, sorted."""
    return sorted(path.stem for path in PROTO_FOLDER.glob("*.proto"))


def generate(out_root: Path) -> dict[str, Path]:
    """Write the stubs to `out_root/octavo/protos`; returns file name -> path.

    Files without a service get no `_pb2_grpc.py`: protoc would leave an empty shell.
    Raises `RuntimeError` when protoc refuses a file; it has then said why on stderr.
    """
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{IMPORT_PREFIX}={PROTO_FOLDER}",
        f"-I{well_known}",
        f"--python_out={out_root}",
        f"--pyi_out={out_root}",
        f"--grpc_python_out={out_root}",
        *(f"{IMPORT_PREFIX}/{name}.proto" for name in proto_names()),
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")
    stubs = {}
    for name in proto_names():
        has_service = "\nservice " in (PROTO_FOLDER / f"{name}.proto").read_text(encoding="utf-8")
        for suffix in STUB_SUFFIXES:
            path = out_root / IMPORT_PREFIX / f"{name}{suffix}"
            if suffix == "_pb2_grpc.py" and not has_service:
                path.unlink()
                continue
            stubs[path.name] = path
    return stubs


def drifted() -> list[str]:
    """Names of committed stubs that differ from what the `.proto` files give now, sorted; missing and left
    over ones included."""
    committed = {
        path.name: path.read_bytes() for path in PROTO_FOLDER.iterdir() if path.name.endswith(STUB_SUFFIXES)
    }
    with tempfile.TemporaryDirectory() as folder:
        fresh = {name: path.read_bytes() for name, path in generate(Path(folder)).items()}
    return sorted(name for name in committed.keys() | fresh.keys() if committed.get(name) != fresh.get(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m octavo.protos.generate", description="Generate protobuf stubs."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a stub is out of date"
    )
    options = parser.parse_args(argv)
    if options.check:
        stale = drifted()
        if stale:
            print(f"out of date: {', '.join(stale)}; run python -m octavo.protos.generate", file=sys.stderr)
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as folder:
        for name, path in sorted(generate(Path(folder)).items()):
            (PROTO_FOLDER / name).write_bytes(path.read_bytes())
            print(f"wrote {PROTO_FOLDER.name}/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
