"""An issuer of tokens for tests: its keys, what they sign, and a server that tells of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from joserfc import jwk, jwt

ISSUER = "https://issuer.example"
AUDIENCE = "diptych"
KEYS_PATH = "/keys"
NOTHING: Mapping[str, object] = {}
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}


class Signer:
    """One key of an issuer's."""

    def __init__(self, kid: str = "k1", algorithm: str = "ES256") -> None:
        self.key: jwk.Key
        if algorithm in _CURVES:
            self.key = jwk.ECKey.generate_key(_CURVES[algorithm], {"kid": kid})
        elif algorithm == "Ed25519":
            self.key = jwk.OKPKey.generate_key("Ed25519", {"kid": kid})
        else:
            self.key = jwk.RSAKey.generate_key(2048, {"kid": kid})
        self.algorithm = algorithm
        self.kid: str | None = kid

    @property
    def public(self) -> dict[str, object]:
        """As it stands in a key set."""
        return {**self.key.as_dict(private=False), "use": "sig", "alg": self.algorithm}

    def token(self, now_s: float | None = None, /, claims: Mapping[str, object] = NOTHING) -> str:
        """Of the tenant alice for an hour, unless claims say otherwise; None leaves one out."""
        now_s = time.time() if now_s is None else now_s
        told = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(now_s) + 3600, **claims}
        header = {"alg": self.algorithm, **({} if self.kid is None else {"kid": self.kid})}
        kept = {name: value for name, value in told.items() if value is not None}
        return jwt.encode(header, kept, self.key, algorithms=[self.algorithm])


def key_set(*signers: Signer) -> bytes:
    """What an issuer publishes."""
    return json.dumps({"keys": [signer.public for signer in signers]}).encode()


class Published:
    """What an issuer's server answers, path by path, while it runs."""

    def __init__(self) -> None:
        self.url = ""
        self.pages: dict[str, bytes] = {}
        self.status = "200 OK"
        self.headers = ""  # further ones, each with its end of line
        self.is_endless = False  # a body never ends
        self.num_asked = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one answer."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.num_asked += 1
        body = self.pages.get(head.split()[1])
        status = "404 Not Found" if body is None else self.status
        length = 10**9 if self.is_endless else len(body or b"")
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{self.headers}"
            "connection: close\r\n\r\n".encode()
        )
        try:
            writer.write(body or b"")
            while self.is_endless:
                writer.write(b" " * 65_536)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def published(*signers: Signer) -> AsyncIterator[Published]:
    """A server on the own machine with these keys at ``KEYS_PATH``."""
    issuer = Published()
    issuer.pages[KEYS_PATH] = key_set(*signers)
    server = await asyncio.start_server(issuer.answer, "127.0.0.1", 0)
    async with server:
        issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield issuer
