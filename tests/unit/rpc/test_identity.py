"""A process is who its certificate says, to servers and clients that look at files anew."""

import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import ValidationError

from diptych.errors import ConfigurationError, DiptychError, PeerNotAllowedError
from diptych.rpc.identity import Identity, PeerRole, TlsFiles
from diptych.rpc.peer_channel import Dialer, PeerChannel
from diptych.rpc.server import make_server
from diptych.rpc.status import from_rpc_error
from diptych.timers import Timers
from diptych.v1 import worker_pb2, worker_pb2_grpc
from tests.authority import Authority, replaced

SERVES = health_pb2.HealthCheckResponse.SERVING


def identity_of(folder: Path, domain: str = "diptych") -> Identity:
    return Identity(folder / "certificate.pem", folder / "key.pem", folder / "ca.pem", domain)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """A server of that certificate with health and a Watch that ends at once; its address."""
    identity = identity_of(folder)
    server = make_server(Timers(), identity=identity)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    class Watch(worker_pb2_grpc.WorkerServicer):
        async def Watch(
            self, request: worker_pb2.WatchRequest, context: object
        ) -> AsyncIterator[worker_pb2.WorkerState]:
            yield worker_pb2.WorkerState(incarnation="w")

        async def EndTraces(
            self, request: worker_pb2.EndTracesRequest, context: object
        ) -> worker_pb2.EndTracesResponse:
            return worker_pb2.EndTracesResponse()

    worker_pb2_grpc.add_WorkerServicer_to_server(Watch(), server)
    await servicer.set("", SERVES)
    port = server.add_secure_port("127.0.0.1:0", identity.of_server())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def check(channel: grpc.aio.Channel) -> None:
    """Raises DiptychError."""
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    assert answer.status == SERVES


async def reach(address: str, folder: Path, role: PeerRole = "prefill") -> None:
    """One call of somebody with that certificate. Raises DiptychError."""
    channel = Dialer(Timers(), identity_of(folder)).open(address, role)
    async with channel:
        await check(channel)


async def test_processes_of_one_authority_reach_each_other(authority: Authority) -> None:
    async with served(authority.issue("prefill")) as address:
        await reach(address, authority.issue("router"))
        await reach(address, authority.issue("decode"))


async def test_who_is_not_the_role_that_is_meant_is_not_spoken_to(authority: Authority) -> None:
    async with served(authority.issue("prefill")) as address:
        with pytest.raises(DiptychError, match="erification"):
            await reach(address, authority.issue("router"), role="decode")


@pytest.mark.parametrize("whose", ["other authority", "server's authority is another", "expired"])
async def test_a_certificate_that_is_not_good_reaches_nothing(
    authority: Authority, tmp_path: Path, whose: str
) -> None:
    other = Authority(tmp_path / "theirs")
    caller = authority.issue("router", days=-1 if whose == "expired" else 1)
    if whose == "other authority":
        caller = other.issue("router")
        authority.trust(caller)
    elif whose != "expired":
        other.trust(caller)
    async with served(authority.issue("prefill")) as address:
        with pytest.raises(DiptychError):
            await reach(address, caller)
        await reach(address, authority.issue("router", folder="good"))


async def test_without_a_certificate_nothing_is_reached(authority: Authority) -> None:
    folder = authority.issue("prefill")
    trust = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "prefill.diptych")]
    async with served(folder) as address:
        async with grpc.aio.secure_channel(address, trust, options=options) as channel:
            with pytest.raises(DiptychError):
                await check(channel)
        async with Dialer(Timers()).open(address, "prefill") as channel:
            with pytest.raises(DiptychError):
                await check(channel)


async def watch(address: str, folder: Path) -> str:
    """Whom one Watch sees. Raises DiptychError."""
    async with Dialer(Timers(), identity_of(folder)).open(address, "prefill") as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(), timeout=10)
        try:
            (incarnation,) = [state.incarnation async for state in call]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return incarnation


@pytest.mark.parametrize("role", ["decode", "prefill", "mystery"])
async def test_a_role_may_call_what_is_for_it_alone(authority: Authority, role: str) -> None:
    async with served(authority.issue("prefill")) as address:
        assert await watch(address, authority.issue("router")) == "w"
        with pytest.raises(PeerNotAllowedError, match=rf"Worker .* {role}\.diptych"):
            await watch(address, authority.issue(role, folder="caller"))


async def test_a_role_of_another_domain_is_none_here(authority: Authority) -> None:
    async with served(authority.issue("prefill")) as address:
        caller = authority.issue("router", domain="elsewhere")
        with pytest.raises(PeerNotAllowedError):
            await watch(address, caller)


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        ("/diptych.v1.Prefill/Prefill", {"router"}),
        ("/diptych.v1.Decode/Decode", {"router"}),
        ("/diptych.v1.KVSource/Fetch", {"decode"}),
        ("/diptych.v1.KVSource/Connect", {"decode"}),
        ("/diptych.v1.Worker/Watch", {"router", "operator"}),
        ("/diptych.v1.Cache/WatchCache", {"router"}),
        ("/diptych.v1.WorkerAdmin/SetRoles", {"operator"}),
        ("/diptych.v1.Faults/SetRules", {"operator"}),
        ("/grpc.health.v1.Health/Check", {"router", "prefill", "decode", "operator"}),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {"operator"}),
        ("/diptych.v1.Tomorrow/Anything", set()),
    ],
)
def test_who_may_call_what(authority: Authority, method: str, allowed: set[str]) -> None:
    identity = identity_of(authority.issue("prefill"))
    for role in ("router", "prefill", "decode", "operator"):
        context = {"peer_dns": [f"{role}.diptych".encode()]}
        if role in allowed:
            identity.check_caller(method, context)
        else:
            with pytest.raises(PeerNotAllowedError):
                identity.check_caller(method, context)


async def test_files_that_changed_count_from_the_next_connection_on(
    authority: Authority, tmp_path: Path
) -> None:
    """All files of both sides are another authority's, and the connection that is up stays."""
    other = Authority(tmp_path / "theirs")
    server, client = authority.issue("prefill"), authority.issue("router")
    async with served(server) as address:
        peer = PeerChannel(Dialer(Timers(), identity_of(client)), address, "prefill")
        before = await peer.renewed()
        await check(before)
        with replaced(server, other.issue("prefill")):
            await check(before)
            assert await peer.renewed() is before  # our own files are as they were
            with pytest.raises(DiptychError):
                await reach(address, authority.issue("router", folder="new"))
            with replaced(client, other.issue("router")):
                after = await peer.renewed()
                assert after is not before
                await check(after)
                await check(before)  # what began there may end there
                assert peer.channel is after
        await peer.close()


async def test_two_changes_later_a_channel_is_closed(authority: Authority) -> None:
    server, client = authority.issue("prefill"), authority.issue("router")
    async with served(server) as address:
        peer = PeerChannel(Dialer(Timers(), identity_of(client)), address, "prefill")
        first = health_pb2_grpc.HealthStub(await peer.renewed())
        for _ in range(2):
            await first.Check(health_pb2.HealthCheckRequest(), timeout=10)
            authority.issue("router")
            await check(await peer.renewed())
        with pytest.raises(grpc.aio.UsageError):
            await first.Check(health_pb2.HealthCheckRequest(), timeout=10)
        await peer.close()


async def test_files_that_do_not_fit_change_nothing(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """As when one of two files is there already: said once, until they fit."""
    server, client = authority.issue("prefill"), authority.issue("router")
    identity = identity_of(client)
    known = identity.pems
    key = (client / "key.pem").read_bytes()
    authority.issue("router", folder="next")
    for broken in ("another key", "no file"):
        caplog.clear()
        if broken == "no file":
            (client / "key.pem").unlink()
        else:
            (client / "key.pem").write_bytes((client.parent / "next" / "key.pem").read_bytes())
        for _ in range(3):
            assert identity.pems == known
        assert [record.message for record in caplog.records] == ["certificate not taken over"]
    async with (
        served(server) as address,
        Dialer(Timers(), identity).open(address, "prefill") as channel,
    ):
        await check(channel)
    (client / "key.pem").write_bytes(key)
    authority.issue("router")
    assert identity.pems != known


def test_files_that_are_replaced_as_they_are_read_are_read_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key of one certificate might be served with another."""
    identity = identity_of(authority.issue("prefill"))
    known = identity.pems
    authority.issue("prefill")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("diptych.rpc.identity._check_key", lambda pem: authority.issue("prefill"))
        assert identity.pems == known
    assert identity.pems != known


Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def use_key(folder: Path, key: Key) -> None:
    """A certificate of that key, by itself, that the folder's own authority did not issue."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prefill.diptych")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(made.sign(key, algorithm).public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))


@pytest.mark.parametrize(
    "make",
    [
        ed25519.Ed25519PrivateKey.generate,
        partial(ec.generate_private_key, ec.SECP521R1()),
        partial(ec.generate_private_key, ec.SECP256K1()),
        partial(rsa.generate_private_key, 65537, 1024),
    ],
)
def test_a_key_that_grpc_cannot_use_is_refused(
    authority: Authority, caplog: pytest.LogCaptureFixture, make: Callable[[], Key]
) -> None:
    folder = authority.issue("prefill")
    identity = identity_of(folder)
    known = identity.pems
    use_key(folder, make())
    for _ in range(3):
        assert identity.pems == known
    assert [record.message for record in caplog.records] == ["certificate not taken over"]
    with pytest.raises(ConfigurationError, match=r"--tls.certificate: .*key") as caught:
        identity_of(folder)
    assert "\n" not in caught.value.message


def test_a_certificate_of_no_version_that_there_is_changes_nothing(authority: Authority) -> None:
    """TLS libraries take it; who connects while it is there must not fail for it."""
    folder = authority.issue("prefill")
    identity = identity_of(folder)
    known = identity.pems
    use_key(folder, ec.generate_private_key(ec.SECP256R1()))
    path = folder / "certificate.pem"
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    path.write_text(ssl.DER_cert_to_PEM_cert(der.replace(b"\xa0\3\2\1\2", b"\xa0\3\2\1\5", 1)))
    assert identity.pems == known
    with pytest.raises(ConfigurationError, match=r"--tls.certificate: .*version"):
        identity_of(folder)


@pytest.mark.parametrize(
    "make",
    [
        partial(ec.generate_private_key, ec.SECP256R1()),
        partial(ec.generate_private_key, ec.SECP384R1()),
        partial(rsa.generate_private_key, 65537, 2048),
    ],
)
def test_keys_that_grpc_can_use_are_taken_over(
    authority: Authority, make: Callable[[], Key]
) -> None:
    folder = authority.issue("prefill")
    identity = identity_of(folder)
    known = identity.pems
    use_key(folder, make())
    assert identity.pems != known


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_a_comment_beside_the_authority_may_be_in_any_language(
    authority: Authority, encoding: str
) -> None:
    server, client = authority.issue("prefill"), authority.issue("router")
    async with served(server) as address:
        for folder in (server, client):
            ca = folder / "ca.pem"
            ca.write_bytes("# Autorität\n".encode(encoding) + ca.read_bytes())
            await reach(address, client)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("certificate", "--tls.certificate: .*does not fit --tls.key"),
        ("key", "--tls.certificate: .*does not fit --tls.key"),
        ("ca", "--tls.ca: .*no certificate in PEM form"),
    ],
)
def test_what_is_wrong_at_the_start_names_its_setting(
    authority: Authority, broken: str, says: str
) -> None:
    folder = authority.issue("prefill")
    (folder / f"{broken}.pem").write_text("nonsense")
    with pytest.raises(ConfigurationError, match=says):
        identity_of(folder)
    (folder / f"{broken}.pem").unlink()
    with pytest.raises(ConfigurationError, match=f"--tls.{broken}: .*No such file"):
        identity_of(folder)


def test_all_three_files_or_none(tmp_path: Path) -> None:
    assert Identity.of(TlsFiles()) is None
    with pytest.raises(ValidationError, match=r"--tls.key: is required by --tls.certificate"):
        TlsFiles(certificate=tmp_path, ca=tmp_path)


def test_nothing_of_a_key_is_in_an_error(authority: Authority) -> None:
    folder = authority.issue("prefill")
    secret = (folder / "key.pem").read_text()
    (folder / "certificate.pem").write_text(secret)
    with pytest.raises(ConfigurationError) as caught:
        identity_of(folder)
    assert not any(line in caught.value.message for line in secret.splitlines() if line)
