"""Where a process of the system listens, and where others are told to find it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.protos.errors import ConfigError

NODE_ADDRESS_VARIABLE = "OCTAVO_NODE_ADDRESS"
BIND_ADDRESS_VARIABLE = "OCTAVO_BIND_ADDRESS"
_WILDCARDS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True)
class Interface:
    """Both are addresses without a port."""

    bind: str
    advertised: str

    @classmethod
    def of_node(cls, node_address: str, environ: Mapping[str, str] = os.environ) -> Interface:
        """Of a process on the node that the cluster knows by `node_address`. `OCTAVO_NODE_ADDRESS`, set on a node, is
        advertised in its place, and `OCTAVO_BIND_ADDRESS` is listened at where the two differ.

        Raises `ConfigError` for an advertised address that nobody could connect to.
        """
        advertised = environ.get(NODE_ADDRESS_VARIABLE) or node_address
        if advertised in _WILDCARDS:
            raise ConfigError(
                f"{NODE_ADDRESS_VARIABLE} is {advertised}: others need one address to connect to",
                param=NODE_ADDRESS_VARIABLE,
            )
        return cls(environ.get(BIND_ADDRESS_VARIABLE) or advertised, advertised)

    def address(self, port: int) -> str:
        """ "host:port", for others."""
        return f"{_bracketed(self.advertised)}:{port}"

    @property
    def any_port(self) -> str:
        """What a server is told to listen at, to be given a free port."""
        return f"{_bracketed(self.bind)}:0"


LOOPBACK = Interface("127.0.0.1", "127.0.0.1")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
