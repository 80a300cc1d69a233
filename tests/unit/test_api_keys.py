"""Keys are made, kept as hashes, and read back; a wrong file is told by its line alone."""

import re

import pytest

from diptych.api_keys import check_tenant, digest, make_key, read_keys
from diptych.cli.key import run
from diptych.errors import ConfigurationError

KEY = "dk-" + "a" * 43


def test_keys_are_new_each_time_and_long() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"dk-[\w-]{43}", key) for key in keys)


def test_a_file_names_the_tenant_of_each_key() -> None:
    other = digest("another")
    text = f"# the first\nalice {digest(KEY)}\n\n  alice\t{other}  \nbob {digest('third')}"
    tenants = read_keys(text)
    assert tenants[digest(KEY)] == tenants[other] == "alice"
    assert tenants[digest("third")] == "bob"
    assert KEY not in text


@pytest.mark.parametrize(
    "line",
    [
        f"alice {KEY}",  # the key itself
        "alice",
        f"{digest(KEY)}",
        f"a b {digest(KEY)}",
        f"al/ice {digest(KEY)}",
        f"alice {digest(KEY)}0",
        f"alice {digest(KEY).upper()}",
    ],
)
def test_a_wrong_line_is_named_and_not_shown(line: str) -> None:
    with pytest.raises(ValueError, match="line 2: expected") as caught:
        read_keys(f"bob {digest('x')}\n{line}")
    assert KEY not in str(caught.value)
    assert digest(KEY) not in str(caught.value)


def test_a_key_is_one_tenants() -> None:
    with pytest.raises(ValueError, match="line 2: the key is there already"):
        read_keys(f"bob {digest('x')}\nalice {digest('x')}")


@pytest.mark.parametrize("name", ["", ".a", "a b", "a" * 65, "ä", "a\n"])
def test_a_tenant_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="expected up to 64"):
        check_tenant(name)


def test_the_command_prints_a_line_that_fits_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["alice"]) == 0
    said = capsys.readouterr()
    key = said.err.strip().rpartition(" ")[2]
    assert read_keys(said.out) == {digest(key): "alice"}
    with pytest.raises(ConfigurationError, match="tenant"):
        run(["al/ice"])
