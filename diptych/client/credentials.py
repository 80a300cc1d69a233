"""How a client is let in, and whom it believes."""

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc

from diptych.errors import ConfigurationError
from diptych.rpc.channel import Lock

_SYSTEM_FILES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS, BSD
)
_OF_GRPC: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"


def metadata_of(api_key: str) -> tuple[tuple[str, str], ...]:
    """What each call says of who calls. Raises ConfigurationError: the key is none."""
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigurationError("the API key is not in one line of ASCII characters")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def lock_of(tls: bool | Path, server_name: str = "") -> Lock | None:
    """False: no TLS; True: the system's authorities are believed; else those in a PEM file.

    ``server_name`` is what the certificate has to be of; empty: the host of the address.
    Raises ConfigurationError: it cannot be read, or has no certificate.
    """
    if tls is False:
        if server_name:
            raise ConfigurationError("the name of a server's certificate is given, and no TLS")
        return None
    if tls is True:
        return grpc.ssl_channel_credentials(_system_authorities()), server_name
    try:
        authorities = tls.read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigurationError(f"{tls}: no certificate in PEM form is in it") from None
    except OSError as error:
        raise ConfigurationError(f"{tls}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(authorities), server_name


def _system_authorities() -> bytes | None:
    """Those that the system believes, in PEM form; None: it does not say, or gRPC's variable does.

    gRPC's wheel goes by a list of public authorities that it brings: one that a company has of
    its own, and that all its machines believe, is not among them.
    """
    from diptych import settings  # with what reads settings, which few clients need

    if settings.environment(_OF_GRPC):
        return None
    said = ssl.get_default_verify_paths().cafile
    for name in (*((said,) if said else ()), *_SYSTEM_FILES):
        with suppress(OSError):
            authorities = Path(name).read_bytes()
            if b"-----BEGIN " in authorities:
                return authorities
    return None
