"""Whom a router lets in, by its settings."""

import time
from pathlib import Path

from router.client_settings import JwtSettings
from router.frontend.callers.api_keys import ApiKeys
from router.frontend.callers.callers import Anybody, Callers, KnownCallers, Tokens


def callers_of(api_keys: Path | None, jwt: JwtSettings) -> Callers:
    """Those of ``--api-keys`` and ``--jwt``; without both, anybody. Raises ConfigurationError."""
    keys = None if api_keys is None else ApiKeys(api_keys)
    tokens = None if jwt.issuer is None else _tokens(jwt, jwt.issuer)
    return Anybody() if keys is None and tokens is None else KnownCallers(keys, tokens)


def _tokens(settings: JwtSettings, issuer: str) -> Tokens:
    """What reads them, and fetches keys, is loaded where it is wanted."""
    from router.frontend.callers.issued_tokens import IssuedTokens, KeySource
    from router.frontend.callers.key_sources import FetchedKeys, FileKeys, Issuer
    from router.frontend.callers.tokens import Expected, TokenReader

    expected = Expected(
        issuer=issuer,
        audience=settings.audience,
        algorithms=settings.algorithms,
        tenant_claim=settings.tenant_claim,
        limits_claim=settings.limits_claim,
        leeway_s=settings.leeway_s,
    )
    keys: KeySource
    if settings.jwks is not None:
        keys = FileKeys(settings.jwks)
    else:
        keys = FetchedKeys(Issuer(issuer, settings.jwks_url, settings.ca), settings.refresh_s)
    return IssuedTokens(TokenReader(expected, time.time), keys)
