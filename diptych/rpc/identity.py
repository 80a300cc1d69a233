"""Who a process of the cluster is, and who may call it: mutual TLS, roles by certificate.

A certificate names its process's role: a DNS name ``<role>.<domain>`` among its subject's
alternative names, such as ``prefill.diptych``; addresses are not in it, for pods have none that
last. Who calls expects the role that it means to reach, and who is called looks at the caller's.

Files may be replaced at any time. What is in them counts from the next connection on; those that
are up stay, whatever their certificates said.
"""

import logging
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

from diptych.errors import ConfigurationError, PeerNotAllowedError

logger = logging.getLogger(__name__)

PeerRole = Literal["router", "prefill", "decode", "operator"]
"""What a certificate of the cluster can name; an operator is a person, or a tool of theirs."""

# Who may call which service; of what is not named here, nobody.
_ALLOWED: Mapping[str, frozenset[PeerRole]] = {
    "diptych.v1.Prefill": frozenset({"router"}),
    "diptych.v1.Decode": frozenset({"router"}),
    "diptych.v1.KVSource": frozenset({"decode"}),
    "diptych.v1.Worker": frozenset({"router", "operator"}),
    "diptych.v1.Cache": frozenset({"router"}),
    "diptych.v1.WorkerAdmin": frozenset({"operator"}),
    "diptych.v1.Faults": frozenset({"operator"}),
    "grpc.health.v1.Health": frozenset({"router", "prefill", "decode", "operator"}),
    "grpc.reflection.v1alpha.ServerReflection": frozenset({"operator"}),
}

_MIN_RSA_BITS = 2048
_CURVES = frozenset({"secp256r1", "secp384r1"})  # P-256 and P-384
_DNS_NAMES = "peer_dns"  # of the subject's alternative names these alone


class TlsFiles(BaseModel):
    """Where a process finds its certificate; all three files, or none: then nothing is locked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path | None = Field(
        None,
        description="PEM file of this process's certificate and those up to the authority; its "
        "DNS name is its role, such as prefill.diptych; its key RSA, P-256 or P-384. Unset, with "
        "key and ca: no TLS.",
    )
    key: Path | None = Field(None, description="PEM file of the certificate's private key.")
    ca: Path | None = Field(
        None,
        description="PEM file of the authorities by whom processes of the cluster are certified.",
    )
    domain: str = Field(
        "diptych",
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="What follows the role in a certificate's DNS name.",
    )

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        files = {"certificate": self.certificate, "key": self.key, "ca": self.ca}
        missing = [name for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            given = next(name for name in files if name not in missing)
            raise ValueError(f"--tls.{missing[0]}: is required by --tls.{given}")
        return self


class _Pems(NamedTuple):
    certificate: bytes
    key: bytes
    ca: bytes | None


class Certificate:
    """A server's certificate as its files say now, and whom it asks for theirs. Any thread."""

    def __init__(self, setting: str, certificate: Path, key: Path, ca: Path | None = None) -> None:
        """``setting`` is what the files are called by, such as ``tls``; without ``ca`` nobody
        who connects is asked for a certificate.

        Raises ConfigurationError: a file is missing, or they do not fit together.
        """
        self._setting = setting
        self._paths = {"certificate": certificate, "key": key}
        if ca is not None:
            self._paths["ca"] = ca
        self._pems: _Pems | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # that holds them
        self._pems = self._read()
        self._refused = ""  # why the files were no use when they were read last

    @property
    def pems(self) -> object:
        """Something that differs once the files do. Reads them."""
        return self._current()

    def tls_context(self) -> ssl.SSLContext:
        """For a connection that begins now, of a server of Python's; another once the files are.

        It is of what was checked, whatever has become of the files since.
        """
        self._current()
        return self._context

    def of_server(self) -> grpc.ServerCredentials:
        """For a port: each connection is judged by the files as they are when it comes."""
        served = self._current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            before, served = served, self._current()
            return None if served == before else _of_server(served)

        fetch: Any = changed  # the stubs do not know that None says: as before
        return grpc.dynamic_ssl_server_credentials(
            _of_server(served), fetch, require_client_authentication="ca" in self._paths
        )

    def _current(self) -> _Pems:
        """What the files hold; what they held, while one of them is missing or does not fit."""
        assert self._pems is not None
        try:
            self._pems, self._refused = self._read(), ""
        except ConfigurationError as error:
            if self._refused != error.message:
                self._refused = error.message
                logger.error("certificate not taken over", extra={"why": error.message})
        return self._pems

    def _read(self) -> _Pems:
        contents = self._contents()
        if contents == self._pems:
            return contents
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        if contents.ca is not None:
            try:
                context.load_verify_locations(cadata=contents.ca.decode("ascii", "ignore"))
            except (ssl.SSLError, ValueError) as error:
                raise self._wrong("ca", f"no certificate in PEM form: {error}") from None
        try:
            paths = self._paths
            context.load_cert_chain(paths["certificate"], paths["key"], _no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            why = f"does not fit --{self._setting}.key: {error}"
            raise self._wrong("certificate", why) from None
        try:
            _check_key(contents.certificate)
        except ValueError as error:
            raise self._wrong("certificate", str(error)) from None
        if self._contents() != contents:
            raise self._wrong("certificate", "is being replaced")
        self._context = context
        return contents

    def _contents(self) -> _Pems:
        read: dict[str, bytes] = {}
        for name, path in self._paths.items():
            try:
                read[name] = path.read_bytes()
            except OSError as error:
                raise self._wrong(name, error.strerror or str(error)) from None
        return _Pems(read["certificate"], read["key"], read.get("ca"))

    def _wrong(self, name: str, why: str) -> ConfigurationError:
        return ConfigurationError(f"--{self._setting}.{name}: {self._paths[name]}: {why}")


class Identity(Certificate):
    """Who one process is to the others of its cluster, and whom of them it believes."""

    def __init__(self, certificate: Path, key: Path, ca: Path, domain: str) -> None:
        """Raises ConfigurationError: a file is missing, or they do not fit together."""
        super().__init__("tls", certificate, key, ca)
        self._domain = domain

    @classmethod
    def of(cls, files: TlsFiles) -> Self | None:
        """That of these settings; None without. Raises ConfigurationError."""
        if files.certificate is None or files.key is None or files.ca is None:
            return None
        return cls(files.certificate, files.key, files.ca, files.domain)

    def name(self, role: PeerRole) -> str:
        """What a certificate of that role says."""
        return f"{role}.{self._domain}"

    def to_peer(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now."""
        pems = self._current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)

    def check_caller(self, method: str, auth_context: Mapping[str, Iterable[bytes]]) -> None:
        """Raises PeerNotAllowedError: the caller's certificate is of no role that may do this.

        ``method`` is /package.Service/Method.
        """
        service = method.strip("/").partition("/")[0]
        allowed = {self.name(role) for role in _ALLOWED.get(service, ())}
        names = {name.decode(errors="replace") for name in auth_context.get(_DNS_NAMES, ())}
        if not allowed & names:
            error = PeerNotAllowedError(
                f"{service} is for {_listed(allowed)}; the certificate is of {_listed(names)}"
            )
            logger.warning("caller refused", extra={"method": method, "why": error.message})
            raise error


def _check_key(certificate: bytes) -> None:
    """Raises ValueError: gRPC would end each connection of a certificate with such a key.

    What reads it is loaded where there is one.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    try:
        key = x509.load_pem_x509_certificate(certificate).public_key()
    except UnsupportedAlgorithm:
        key = None
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from None
    is_good = (isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS) or (
        isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES
    )
    if not is_good:
        raise ValueError(f"its key is neither RSA of {_MIN_RSA_BITS} bits nor P-256 nor P-384")


def _of_server(pems: _Pems) -> grpc.ServerCertificateConfiguration:
    configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.certificate)], root_certificates=pems.ca
    )
    return configuration


def _no_password() -> bytes:
    """A key with a password is refused, rather than asked for at the terminal."""
    raise ValueError("the key has a password")


def _listed(names: Iterable[str]) -> str:
    return " or ".join(sorted(names)) or "nobody"
