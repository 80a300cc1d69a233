"""Whose a token is, and what makes it none."""

import base64
import json

import pytest
from joserfc import jwk, jws, jwt
from joserfc.jws import JWSRegistry

from diptych.errors import InvalidApiKeyError
from diptych.tenant import Limits, Tenant
from router.frontend.callers.signing_keys import SigningKeys, read_signing_keys
from router.frontend.callers.tokens import Expected, TokenReader, UnknownSigningKeyError
from tests.issuer import AUDIENCE, ISSUER, Signer, key_set

NOW_S = 1_000_000.0
SIGNER = Signer()
KEYS = read_signing_keys(key_set(SIGNER))
EXPECTED = Expected(
    issuer=ISSUER,
    audience=[AUDIENCE, "another"],
    algorithms=("ES256", "RS256"),
    tenant_claim="sub",
    limits_claim=None,
    leeway_s=30,
)


def tenant(token: str, keys: SigningKeys = KEYS, expected: Expected = EXPECTED) -> str:
    return TokenReader(expected, lambda: NOW_S).tenant(token, keys).name


def refused(token: str, keys: SigningKeys = KEYS, expected: Expected = EXPECTED) -> str:
    """Why it is."""
    with pytest.raises(InvalidApiKeyError) as caught:
        tenant(token, keys, expected)
    return caught.value.message


@pytest.mark.parametrize("algorithm", ["RS256", "PS384", "ES256", "ES512", "Ed25519"])
def test_a_claim_names_the_tenant(algorithm: str) -> None:
    signer = Signer("k", algorithm)
    expected = EXPECTED._replace(algorithms=(algorithm,))
    assert tenant(signer.token(NOW_S), read_signing_keys(key_set(signer)), expected) == "alice"


def test_which_claim_it_is_can_be_said() -> None:
    expected = EXPECTED._replace(tenant_claim="https://example.com/team")
    token = SIGNER.token(NOW_S, {"https://example.com/team": "blue"})
    assert tenant(token, expected=expected) == "blue"
    assert "tenant" in refused(SIGNER.token(NOW_S), expected=expected)


def test_one_of_several_audiences_is_enough() -> None:
    assert tenant(SIGNER.token(NOW_S, {"aud": ["x", "another"]})) == "alice"


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"iss": "https://other.example"}, "iss"),
        ({"iss": None}, "iss"),
        ({"iss": [ISSUER]}, "iss"),
        ({"aud": "somebody"}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": []}, "aud"),
        ({"aud": {AUDIENCE: 1}}, "aud"),
        ({"exp": None}, "exp"),
        ({"exp": "tomorrow"}, "exp"),
        ({"exp": NOW_S - 31}, "expired"),
        ({"nbf": NOW_S + 31}, "not yet valid"),
        ({"iat": NOW_S + 31}, "in the future"),
        ({"sub": None}, "tenant"),
        ({"sub": ""}, "tenant"),
        ({"sub": 7}, "sub"),
        ({"sub": ["alice"]}, "sub"),
        ({"sub": "a\nb"}, "tenant"),
        ({"sub": "a" * 256}, "tenant"),
    ],
)
def test_claims_that_are_not_right(claims: dict[str, object], says: str) -> None:
    why = refused(SIGNER.token(NOW_S, claims))
    assert says in why
    assert "other.example" not in why
    assert "somebody" not in why


@pytest.mark.parametrize("claims", [{"exp": NOW_S - 29}, {"nbf": NOW_S + 29}, {"iat": NOW_S + 29}])
def test_clocks_may_differ_a_little(claims: dict[str, object]) -> None:
    assert tenant(SIGNER.token(NOW_S, claims)) == "alice"


@pytest.mark.parametrize("name", ["a", "a" * 255, "東京"])
def test_a_name_is_any_text_of_up_to_so_many_characters(name: str) -> None:
    assert tenant(SIGNER.token(NOW_S, {"sub": name})) == name


def test_a_signature_of_somebody_elses_is_none() -> None:
    impostor = Signer()  # of the same key id
    assert "signature" in refused(impostor.token(NOW_S))
    head, _, signature = SIGNER.token(NOW_S).split(".")
    _, other, _ = SIGNER.token(NOW_S, {"sub": "bob"}).split(".")
    assert "signature" in refused(f"{head}.{other}.{signature}")


def test_a_key_that_is_not_known_may_be_a_newer_one() -> None:
    with pytest.raises(UnknownSigningKeyError):
        tenant(Signer("k2").token(NOW_S))
    with pytest.raises(UnknownSigningKeyError):
        tenant(SIGNER.token(NOW_S), SigningKeys())


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_no_token_is_signed_by_nothing() -> None:
    _, body, _ = SIGNER.token(NOW_S).split(".")
    for algorithm in ("none", "None", "NONE"):
        assert "unsupported_algorithm" in refused(f"{part({'alg': algorithm})}.{body}.")


def test_a_public_key_is_no_secret_to_sign_with() -> None:
    """The classic confusion: what everybody knows of a key taken for a shared secret."""
    known = json.dumps(SIGNER.public).encode()
    secret = jwk.OctKey.import_key(known, {"kid": "k1"})
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": NOW_S + 60}
    token = jwt.encode({"alg": "HS256", "kid": "k1"}, claims, secret, algorithms=["HS256"])
    assert "unsupported_algorithm" in refused(token)


def test_a_header_may_say_more_than_is_known() -> None:
    """Issuers put names of their own there, and hashes of certificates."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": NOW_S + 60}
    header = {"alg": "ES256", "kid": "k1", "x5t": "abc", "nonce": "n", "of-ours": {"a": 1}}
    token = jws.serialize_compact(
        header,
        json.dumps(claims).encode(),
        SIGNER.key,
        registry=JWSRegistry(strict_check_header=False),
    )
    assert tenant(token) == "alice"


def test_a_long_token_is_not_read() -> None:
    most = SIGNER.token(NOW_S, {"more": "x" * 11_900})
    assert 16_000 < len(most) <= 16_384
    assert tenant(most) == "alice"
    assert "longer than 16384" in refused(SIGNER.token(NOW_S, {"more": "x" * 12_400}))


def test_an_algorithm_that_is_not_set_is_not_taken() -> None:
    signer = Signer("k", "PS256")
    why = refused(signer.token(NOW_S), read_signing_keys(key_set(signer)))
    assert "unsupported_algorithm" in why


def test_a_header_that_demands_what_is_not_understood_is_refused() -> None:
    _, body, signature = SIGNER.token(NOW_S).split(".")
    header = {"alg": "ES256", "kid": "k1", "crit": ["mystery"], "mystery": 1}
    refused(f"{part(header)}.{body}.{signature}")


NAMELESS: list[object] = [None, 1, [], {}]


@pytest.mark.parametrize(
    "token",
    [
        *("", ".", "..", "a.b", "a.b.c", "é.é.é", "a.b.c.d.e", "x" * 16_385),
        f"{part([])}.{part({})}.a",
        *(f"{part({'alg': wrong})}.{part({})}.a" for wrong in NAMELESS),
        *(f"{part({'alg': 'ES256', 'kid': wrong})}.{part({})}.a" for wrong in NAMELESS),
    ],
)
def test_what_is_no_token(token: str) -> None:
    refused(token)


@pytest.mark.parametrize("payload", [b"[]", b"\xff", b"[" * 5000, b'"text"'])
def test_claims_that_are_none(payload: bytes) -> None:
    header = {"alg": "ES256", "kid": "k1"}
    refused(jws.serialize_compact(header, payload, SIGNER.key, algorithms=["ES256"]))


LIMITED = EXPECTED._replace(limits_claim="limits")


def test_a_claim_may_say_limits() -> None:
    reader = TokenReader(LIMITED, lambda: NOW_S)
    token = SIGNER.token(NOW_S, {"limits": {"max_concurrent": 4, "tokens_per_minute": 900}})
    assert reader.tenant(token, KEYS) == Tenant("alice", Limits(None, 900, 4))
    least = SIGNER.token(NOW_S, {"limits": {"max_concurrent": 1}})
    assert reader.tenant(least, KEYS) == Tenant("alice", Limits(max_concurrent=1))
    assert reader.tenant(SIGNER.token(NOW_S), KEYS) == Tenant("alice")
    assert TokenReader(EXPECTED, lambda: NOW_S).tenant(token, KEYS) == Tenant("alice")


@pytest.mark.parametrize(
    "limits",
    [
        *(7, [], "max_concurrent", {"x": 1}),
        *({"max_concurrent": wrong} for wrong in (0, True, "4", 1.5, None, [4])),
    ],
)
def test_limits_that_make_no_sense_let_nobody_in(limits: object) -> None:
    why = refused(SIGNER.token(NOW_S, {"limits": limits}), expected=LIMITED)
    assert "claim of limits" in why
