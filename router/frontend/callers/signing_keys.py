"""The public keys by which an issuer's tokens are known: a JSON Web Key Set. Pure."""

import json
from collections.abc import Mapping
from typing import Final

from joserfc import jwk
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry

_MAX_KEYS: Final = 64
_MIN_RSA_CHARACTERS: Final = 342  # of a modulus of 2,048 bits; weaker keys count for nothing
_KEY_TYPES: Final = frozenset({"RSA", "EC", "OKP"})  # never one that who verifies could sign with
_PUBLIC: Final = frozenset({"kty", "kid", "use", "alg", "key_ops", "n", "e", "crv", "x", "y"})


class SigningKeys:
    """An issuer's keys at one time. Immutable; two of the same keys are equal."""

    def __init__(self, keys: tuple[jwk.Key, ...] = ()) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SigningKeys) and self._keys == other._keys

    def find(self, kid: object, algorithm: str) -> jwk.Key | None:
        """The key of that id that may verify such signatures; None if there is none.

        For a token that names no key: the only one there is for the algorithm.
        """
        fit = [key for key in self._keys if _is_for(key, algorithm)]
        if kid is None:
            return fit[0] if len(fit) == 1 else None
        return next((key for key in fit if key.kid == kid), None)


def read_signing_keys(text: str | bytes) -> SigningKeys:
    """The keys of such a set that can verify; those of other kinds are passed over.

    An empty set takes all keys back. Raises ValueError: it is no key set, or none of its keys is
    of use; it says nothing of its content.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise ValueError("is no JSON Web Key Set: it has no list of keys")
    if len(listed) > _MAX_KEYS:
        raise ValueError(f"has more than {_MAX_KEYS} keys")
    keys = tuple(key for key in map(_read, listed) if key is not None)
    if listed and not keys:
        raise ValueError("has no public key that could verify a token")
    return SigningKeys(keys)


def _read(given: object) -> jwk.Key | None:
    if not isinstance(given, Mapping):
        return None
    kind = given.get("kty")
    if not isinstance(kind, str) or kind not in _KEY_TYPES:
        return None
    public = {name: given[name] for name in _PUBLIC & given.keys()}
    if kind == "RSA" and len(str(given.get("n"))) < _MIN_RSA_CHARACTERS:
        return None
    try:
        key = jwk.import_key(public)
        key.check_use("sig")
        key.check_key_op("verify")
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    return key


def _is_for(key: jwk.Key, algorithm: str) -> bool:
    model = JWSRegistry.algorithms.get(algorithm)
    try:
        if model is not None:
            model.check_key(key)
    except JoseError:
        return False
    return model is not None
