"""Which keys of a set can verify tokens, and which of them a token means."""

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwk

from router.frontend.callers.signing_keys import read_signing_keys
from tests.issuer import Signer, key_set


def test_a_key_is_found_by_its_id_and_algorithm() -> None:
    keys = read_signing_keys(key_set(Signer("a"), Signer("b"), Signer("b", "RS256")))
    assert len(keys) == 3
    found = keys.find("b", "RS256")
    assert found is not None
    assert found.key_type == "RSA"
    assert keys.find("c", "ES256") is None
    assert keys.find("a", "RS256") is None, "it is of another kind"


def test_without_an_id_only_one_that_stands_alone_is_meant() -> None:
    one, two = Signer("a"), Signer("b")
    assert read_signing_keys(key_set(one, Signer("r", "RS256"))).find(None, "ES256") is not None
    assert read_signing_keys(key_set(one, two)).find(None, "ES256") is None


def test_a_key_without_an_algorithm_is_for_all_of_its_kind() -> None:
    public = {name: value for name, value in Signer("a", "RS256").public.items() if name != "alg"}
    keys = read_signing_keys(json.dumps({"keys": [public]}))
    assert keys.find("a", "RS256") is not None
    assert keys.find("a", "PS512") is not None
    assert keys.find("a", "ES256") is None
    assert keys.find("a", "none") is None
    assert keys.find("a", "HS256") is None


def test_a_key_that_says_its_algorithm_is_for_no_other() -> None:
    keys = read_signing_keys(key_set(Signer("a", "RS256")))
    assert keys.find("a", "RS512") is None


def test_an_rsa_key_that_can_be_broken_counts_for_nothing() -> None:
    number = rsa.generate_private_key(65_537, 1024).public_key().public_numbers().n
    modulus = base64.urlsafe_b64encode(number.to_bytes(128)).rstrip(b"=").decode()
    weak = {"kty": "RSA", "kid": "w", "n": modulus, "e": "AQAB"}
    keys = read_signing_keys(json.dumps({"keys": [weak, Signer("a", "RS256").public]}))
    assert keys.find("w", "RS256") is None
    assert keys.find("a", "RS256") is not None


def test_what_could_sign_too_is_passed_over_and_what_is_private_forgotten() -> None:
    symmetric = jwk.OctKey.generate_key(256, {"kid": "s"}).as_dict(private=True)
    private = Signer("p").key.as_dict(private=True)
    keys = read_signing_keys(json.dumps({"keys": [symmetric, private]}))
    assert keys.find("s", "HS256") is None
    found = keys.find("p", "ES256")
    assert found is not None
    assert not found.is_private


@pytest.mark.parametrize(
    "other",
    [
        "no key",
        {"kty": "RSA", "kid": "w", "n": "AQAB", "e": "AQAB"},  # far too short
        {"kty": "EC", "kid": "w", "crv": "P-256", "x": "??", "y": 3},
        {"kty": "EC", "kid": "w"},
        {"kty": ["EC"], "kid": "w"},
        {"kty": "AKP", "kid": "of tomorrow"},
        {**Signer("w").public, "use": "enc"},
        {**Signer("w").public, "key_ops": ["encrypt"]},
    ],
)
def test_one_that_is_of_no_use_spoils_no_other(other: object) -> None:
    keys = read_signing_keys(json.dumps({"keys": [other, Signer("a").public]}))
    assert len(keys) == 1
    with pytest.raises(ValueError, match="has no public key"):
        read_signing_keys(json.dumps({"keys": [other]}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "no list of keys"),
        ('{"keys": {}}', "no list of keys"),
        ('{"keys": [{}]}', "has no public key"),
        (json.dumps({"keys": [{}] * 65}), "more than 64 keys"),
    ],
)
def test_what_is_no_key_set_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_signing_keys(text)


def test_sets_of_the_same_keys_are_equal() -> None:
    one, other = Signer("a"), Signer("a")
    assert read_signing_keys(key_set(one)) == read_signing_keys(key_set(one))
    assert read_signing_keys(key_set(one)) != read_signing_keys(key_set(other))
