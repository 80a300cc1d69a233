"""Settings of what a router's clients are shown, and of whom it lets in."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from diptych.request_class import RequestClass
from diptych.rpc.identity import Certificate
from diptych.service_level import ObjectiveMs
from diptych.tenant import MAX_LIMIT, Limits

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]
"""By which a token may be signed: who can verify it cannot sign another."""


def _check_url(value: str) -> str:
    parts = urlsplit(value)
    if "@" in value or parts.query or parts.fragment:  # a secret, which no error repeats
        raise ValueError("expected no user, password, query and fragment (got some of them)")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_here(parts.hostname)):
        raise ValueError("expected https://…; http is for the own machine alone")
    if not parts.hostname:
        raise ValueError("expected https://…")
    return value


def _is_here(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


HttpsUrl = Annotated[str, AfterValidator(_check_url)]


class PublicTls(BaseModel):
    """What clients are shown; both files, or none: then they speak plain gRPC and HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path | None = Field(
        None,
        description="PEM file of the router's certificate for clients, and those up to the "
        "authority, of gRPC and HTTP. Unset, with key: no TLS.",
    )
    key: Path | None = Field(None, description="PEM file of the certificate's private key.")

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        for missing, given in (("certificate", "key"), ("key", "certificate")):
            if getattr(self, missing) is None and getattr(self, given) is not None:
                raise ValueError(f"--public-tls.{missing}: is required by --public-tls.{given}")
        return self

    def read(self) -> Certificate | None:
        """What the files hold; None: there are none. Raises ConfigurationError."""
        if self.certificate is None or self.key is None:
            return None
        return Certificate("public-tls", self.certificate, self.key)


class JwtSettings(BaseModel):
    """Which tokens (JSON Web Tokens) clients may send in a key's place."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    issuer: HttpsUrl | None = Field(
        None,
        description="Who signs tokens, as their claim iss says it: https://…, an OpenID provider "
        "say. Unset: there are none.",
    )
    audience: list[str] = Field(
        [], description="Whom a token is for: one of these has to be in its claim aud."
    )
    jwks_url: HttpsUrl | None = Field(
        None,
        description="Where the issuer's keys are (a JSON Web Key Set). Unset: as the issuer's "
        "/.well-known/openid-configuration says.",
    )
    jwks: Path | None = Field(
        None,
        description="File of the issuer's keys, in place of asking for them. A change counts two "
        "seconds later.",
    )
    ca: Path | None = Field(
        None,
        description="PEM file of whom to believe that it is the issuer, read anew when that is "
        "asked. Unset: the system's.",
    )
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256"), min_length=1, description="By which tokens may be signed."
    )
    tenant_claim: str = Field(
        "sub", min_length=1, description="The claim that names the tenant whose requests they are."
    )
    limits_claim: str | None = Field(
        None,
        min_length=1,
        description="The claim of the tenant's limits, an object of numbers named as under quota; "
        "what it does not say quota does. Unset: tokens say nothing of limits.",
    )
    leeway_s: int = Field(
        30, ge=0, le=600, description="That the issuer's clock may differ from the router's, s."
    )
    refresh_s: float = Field(
        300.0, ge=1, description="Time between two times of asking for the issuer's keys, s."
    )

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.issuer is None:
            given = next(iter(self.model_dump(exclude_defaults=True)), None)
            if given is not None:
                flag = given.replace("_", "-")
                raise ValueError(f"--jwt.issuer: is required by --jwt.{flag}")
        elif not self.audience or not all(self.audience):
            raise ValueError("--jwt.audience: is required by --jwt.issuer")
        elif self.jwks is not None and (self.jwks_url is not None or self.ca is not None):
            given = "jwks-url" if self.jwks_url is not None else "ca"
            raise ValueError(f"--jwt.{given}: no one is asked for keys with --jwt.jwks")
        return self


class QuotaSettings(BaseModel):
    """What each tenant may take of this router, unless its key or token says it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        description="Requests that a tenant may make, a minute's worth at once. Unset: any number.",
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        description="Tokens of a tenant's prompts and answers, a minute's worth at once; "
        "max_tokens count until an answer has ended. Unset: any number.",
    )
    max_concurrent: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        description="Requests of a tenant that may be open. Unset: any number.",
    )

    @property
    def limits(self) -> Limits:
        """The same as plain data."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)


class Objectives(NamedTuple):
    """What requests shall have, ms; None: no matter."""

    ttft_ms: float | None = None  # from a request's arrival until its first token
    tpot_ms: float | None = None  # between two tokens, on average


class ClassSettings(BaseModel):
    """Of one class of requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ttft_ms: ObjectiveMs | None = Field(
        None,
        description="Time to first token, from the arrival on, of requests that do not say it, "
        "ms. Unset: ttft_objective_ms.",
    )
    tpot_ms: ObjectiveMs | None = Field(
        None,
        description="Mean time between tokens of requests that do not say it, ms. Unset: "
        "tpot_objective_ms.",
    )


class ClassWeights(BaseModel):
    """Shares of the engines' seconds, beside each other, of classes of which requests wait."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    realtime: float = Field(8.0, ge=0.001, le=1000, description="Of realtime requests.")
    standard: float = Field(4.0, ge=0.001, le=1000, description="Of standard requests.")
    batch: float = Field(1.0, ge=0.001, le=1000, description="Of batch requests.")


class ClassesSettings(BaseModel):
    """How urgent requests are, and what each class is promised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: RequestClass = Field(
        RequestClass.STANDARD,
        description="The class of requests that do not say theirs, unless the client's key does.",
    )
    highest: RequestClass = Field(
        RequestClass.REALTIME,
        description="The most urgent class that a request may have, unless the client's key says "
        "another.",
    )
    weights: ClassWeights = ClassWeights()
    realtime: ClassSettings = ClassSettings()
    standard: ClassSettings = ClassSettings()
    batch: ClassSettings = ClassSettings()

    def of(self, request_class: RequestClass) -> ClassSettings:
        """The settings of one class."""
        settings: ClassSettings = getattr(self, request_class.value)
        return settings

    @property
    def weight_of(self) -> Mapping[RequestClass, float]:
        """The weight of each class."""
        return {each: getattr(self.weights, each.value) for each in RequestClass}
