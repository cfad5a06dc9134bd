"""HTTPS, with a certificate of the operator's."""

import ssl

from shared.errors import ConfigError


def load_tls(certificate: str, key: str) -> ssl.SSLContext | None:
    """Reads the PEM files of `gateway.tls_certificate` and `tls_key`; None if both are empty.

    ConfigError: one of them is missing or cannot be used.
    """
    if not certificate and not key:
        return None
    if not certificate or not key:
        missing = "tls_key" if certificate else "tls_certificate"
        raise ConfigError(f"HTTPS needs gateway.{missing} too")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"HTTPS: {certificate} and {key} cannot be used: {error}") from error
    return context
