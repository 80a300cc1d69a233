"""What a token of an issuer's says, once it is certain that the issuer said it. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from joserfc import jwk, jwt
from joserfc.errors import (
    BadSignatureError,
    ExpiredTokenError,
    InvalidClaimError,
    JoseError,
    MissingClaimError,
)
from joserfc.jws import JWSRegistry

from diptych.errors import InvalidApiKeyError
from diptych.tenant import Tenant, Terms, read_terms
from router.frontend.callers.signing_keys import SigningKeys

_MAX_CHARACTERS: Final = 16_384
_MAX_TENANT_CHARACTERS: Final = 255  # as OpenID's of a subject


class UnknownSigningKeyError(InvalidApiKeyError):
    """None of the keys is the one that the token names; the issuer may have a newer one."""


class Expected(NamedTuple):
    """What a token has to say."""

    issuer: str
    audience: Sequence[str]  # one of them
    algorithms: Sequence[str]  # asymmetric ones
    tenant_claim: str
    limits_claim: str | None  # of the tenant's limits, an object; None: tokens say nothing of them
    leeway_s: int  # that two clocks may differ by


class TokenReader:
    """Reads tokens of one issuer. ``now`` is of the wall clock, s."""

    def __init__(self, expected: Expected, now: Callable[[], float]) -> None:
        self._expected = expected
        self._registry = JWSRegistry(algorithms=expected.algorithms, strict_check_header=False)
        self._claims = jwt.JWTClaimsRegistry(
            now=lambda: int(now()),
            leeway=expected.leeway_s,
            iss={"essential": True, "value": expected.issuer},
            aud={"essential": True, "values": list(expected.audience)},
            exp={"essential": True},
        )

    def tenant(self, token: str, keys: SigningKeys) -> Tenant:
        """Whose it is.

        Raises InvalidApiKeyError, whose message says why and quotes nothing of the token;
        UnknownSigningKeyError where it may be good by newer keys.
        """
        if not token.isascii() or len(token) > _MAX_CHARACTERS:
            raise InvalidApiKeyError(f"the token is longer than {_MAX_CHARACTERS}, or no token")
        try:
            read = jwt.decode(token, lambda signed: _key_of(signed, keys), registry=self._registry)
            self._claims.validate(read.claims)
        except ExpiredTokenError:
            raise InvalidApiKeyError("the token has expired") from None
        except BadSignatureError:
            raise InvalidApiKeyError("the token's signature is not the issuer's") from None
        except (InvalidClaimError, MissingClaimError) as error:
            raise InvalidApiKeyError(f"the token's claims are not right: {_why(error)}") from None
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            why = error.error if isinstance(error, JoseError) else "not in form"
            raise InvalidApiKeyError(f"the token is not right: {why}") from None
        return Tenant(self._name(read.claims), *self._terms(read.claims))

    def _name(self, claims: dict[str, Any]) -> str:
        tenant = claims.get(self._expected.tenant_claim)
        if (
            not isinstance(tenant, str)
            or not 0 < len(tenant) <= _MAX_TENANT_CHARACTERS
            or not tenant.isprintable()
        ):
            raise InvalidApiKeyError("the token's claim of its tenant is no name")
        return tenant

    def _terms(self, claims: dict[str, Any]) -> Terms:
        name = self._expected.limits_claim
        if name is None or name not in claims:
            return Terms()
        try:
            if not isinstance(claims[name], dict):
                raise ValueError("expected an object")
            return read_terms(claims[name])
        except ValueError as error:
            raise InvalidApiKeyError(f"the token's claim of limits: {error}") from None


def _key_of(signed: jwk.GuestProtocol, keys: SigningKeys) -> jwk.Key:
    """Called once the header is checked: its algorithm is one that is allowed."""
    headers = signed.headers()
    key = keys.find(headers.get("kid"), headers["alg"])
    if key is None:
        raise UnknownSigningKeyError("the token's key is not one of the issuer's that are known")
    return key


def _why(error: InvalidClaimError | MissingClaimError) -> str:
    """The claim's name, which is ours to know, and never its value."""
    return error.description
