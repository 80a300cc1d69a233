"""How a client is let in, and whom it believes."""

import ssl
from pathlib import Path

import grpc

from diptych.errors import ConfigurationError
from diptych.rpc.channel import Lock


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
        return grpc.ssl_channel_credentials(), server_name
    try:
        authorities = tls.read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigurationError(f"{tls}: no certificate in PEM form is in it") from None
    except OSError as error:
        raise ConfigurationError(f"{tls}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(authorities), server_name
