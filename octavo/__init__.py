"""Octavo: large language models, served from blocks.

The public names load lazily: importing them pulls in no torch, ray or grpc until one is used.
"""

from typing import TYPE_CHECKING, Any

from octavo._version import __version__

if TYPE_CHECKING:
    from octavo.cluster.client import AsyncClient, Client
    from octavo.cluster.engine import Engine
    from octavo.protos.structured_output import StructuredOutput
    from octavo.protos.types import SamplingParams

__all__ = ["AsyncClient", "Client", "Engine", "SamplingParams", "StructuredOutput", "__version__"]

_HOME = {
    "AsyncClient": "octavo.cluster.client",
    "Client": "octavo.cluster.client",
    "Engine": "octavo.cluster.engine",
    "SamplingParams": "octavo.protos.types",
    "StructuredOutput": "octavo.protos.structured_output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
