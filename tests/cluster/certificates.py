"""An authority and certificates that it signs, in PEM files: what docs/security.md makes with openssl."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from octavo.protos.auth import TLS_NAME
from octavo.protos.tls import TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._subject = subject
        certificate = self._builder(subject, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.path = self._write(f"{name}.pem", certificate.sign(self._key, hashes.SHA256()))

    def issue(self, name: str = TLS_NAME) -> TlsFiles:
        """A certificate for `name`, for both ends of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key
        ).add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        key_path = self._folder / f"{self._name}-{name}.key"
        key_path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        signed = certificate.sign(self._key, hashes.SHA256())
        return TlsFiles(self._write(f"{self._name}-{name}.pem", signed), str(key_path), self.path)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> str:
        path = self._folder / name
        path.write_bytes(certificate.public_bytes(Encoding.PEM))
        return str(path)
