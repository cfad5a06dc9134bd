"""A cluster's own authorities (X.509), and the certificates that they sign.

There are two, each for one question: `servers` says that a NATS server or a gateway is the host
that was dialled, `nodes` that whoever connects to a node, or answers as one, is a node.
"""

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.local.private import private_directory, write_private
from shared.errors import ConfigError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 825
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
_PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Authority:
    def __init__(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey):
        self.name = name
        self._certificate = certificate
        self._key = key

    @classmethod
    def of(cls, directory: Path, name: str) -> Self:
        """The authority of this name, made if it is missing. Its key lies in `directory`."""
        public, private = directory / f"{name}.pem", directory / f"{name}.key"
        try:
            if private.exists():
                key = serialization.load_pem_private_key(private.read_bytes(), None)
                certificate = x509.load_pem_x509_certificate(public.read_bytes())
                if not isinstance(key, ec.EllipticCurvePrivateKey):
                    raise ConfigError(f"{private}: not a key of `lambdascale init`")
                return cls(name, certificate, key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: the authority {name} is damaged: {error}") from error
        private_directory(directory)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"lambdascale {name}")
        signs = x509.KeyUsage(
            False, False, False, False, False, key_cert_sign=True, crl_sign=True,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(subject, subject, key, AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        certificate = builder.add_extension(signs, True).sign(key, hashes.SHA256())
        write_private(private, _key_pem(key))
        write_private(public, _pem(certificate))
        return cls(name, certificate, key)

    def issue(self, directory: Path, subject: str, hosts: Iterable[str]) -> None:
        """Writes a key and a certificate for these hosts, names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(subject), self._certificate.subject, key, CERTIFICATE_DAYS)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(x509.ExtendedKeyUsage(_PURPOSES), False)
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False
            )
            .sign(self._key, hashes.SHA256())
        )
        private_directory(directory)
        write_private(directory / KEY, _key_pem(key))
        write_private(directory / CERTIFICATE, _pem(certificate))

    def trust(self, directory: Path) -> None:
        """Writes the authority's own certificate there, for whoever has to check others."""
        write_private(directory / f"{self.name}.pem", _pem(self._certificate))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # for machines whose clocks are behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
