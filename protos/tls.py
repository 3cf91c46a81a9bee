"""Where a process has its certificate, its key and the authority of its system. Needs no gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, at the same paths on every node: its own certificate and key, and the authority that signed all of
    them. Read at every use, so that a connection made later uses what was renewed."""

    cert: str
    key: str
    authority: str

    @classmethod
    def of(cls, cert: str | None, key: str | None, authority: str | None) -> TlsFiles | None:
        """None without any. Raises `ConfigError` when one is missing, or not a file that can be read here."""
        given = {"tls_cert": cert, "tls_key": key, "tls_ca": authority}
        missing = [name for name, path in given.items() if not path]
        if len(missing) == len(given):
            return None
        if missing:
            raise ConfigError(f"{', '.join(missing)} must be given too: all three or none", param=missing[0])
        files = cls(str(cert), str(key), str(authority))
        for name, path in given.items():
            try:
                Path(str(path)).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} {path} cannot be read: {error.strerror}", param=name) from None
        return files

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority), PEM. Raises `OSError` for files that are gone."""
        cert, key, authority = (Path(path).read_bytes() for path in (self.cert, self.key, self.authority))
        return cert, key, authority
