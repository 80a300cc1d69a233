"""Keys are made, kept as hashes, and read back; a wrong file is told by its line alone."""

import re

import pytest

from diptych.api_keys import check_tenant, digest, make_key, read_keys
from diptych.cli.key import run
from diptych.errors import ConfigurationError
from diptych.request_class import RequestClass
from diptych.tenant import MAX_LIMIT, Classes, Limits, Tenant

KEY = "dk-" + "a" * 43


def test_keys_are_new_each_time_and_long() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"dk-[\w-]{43}", key) for key in keys)


def test_a_file_names_the_tenant_of_each_key() -> None:
    other = digest("another")
    text = f"# the first\nalice {digest(KEY)}\n\n  alice\t{other}  \nbob {digest('third')}"
    tenants = read_keys(text)
    assert tenants[digest(KEY)] == tenants[other] == Tenant("alice")
    assert tenants[digest("third")] == Tenant("bob")
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
    assert read_keys(said.out) == {digest(key): Tenant("alice")}
    with pytest.raises(ConfigurationError, match="tenant"):
        run(["al/ice"])


def test_the_command_writes_limits_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["alice", "--requests-per-minute", "60", "--max-concurrent", "4"]) == 0
    said = capsys.readouterr()
    key = said.err.strip().rpartition(" ")[2]
    assert read_keys(said.out) == {digest(key): Tenant("alice", Limits(60, None, 4))}
    with pytest.raises(ConfigurationError, match="--max-concurrent"):
        run(["alice", "--max-concurrent", "0"])


@pytest.mark.parametrize("name", Limits._fields)
def test_the_command_writes_no_limit_that_a_router_refuses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigurationError, match=rf"^{flag}: .* {MAX_LIMIT} "):
        run(["alice", flag, str(MAX_LIMIT + 1)])
    assert capsys.readouterr() == ("", "")
    assert run(["alice", flag, str(MAX_LIMIT)]) == 0
    (tenant,) = read_keys(capsys.readouterr().out).values()
    assert getattr(tenant.limits, name) == MAX_LIMIT


def test_the_command_writes_classes_down(capsys: pytest.CaptureFixture[str]) -> None:
    classes = ["--default-class", "batch", "--highest-class", "standard"]
    assert run(["alice", "--max-concurrent", "4", *classes]) == 0
    said = capsys.readouterr()
    key = said.err.strip().rpartition(" ")[2]
    terms = (Limits(max_concurrent=4), Classes(RequestClass.BATCH, RequestClass.STANDARD))
    assert read_keys(said.out) == {digest(key): Tenant("alice", *terms)}
    with pytest.raises(ConfigurationError, match="--highest-class"):
        run(["alice", "--highest-class", "urgent"])


def test_limits_are_a_tenants_whichever_key_it_sends() -> None:
    text = f"alice {digest('1')}\nbob {digest('2')}\nalice {digest('3')} tokens_per_minute=9"
    tenants = read_keys(text)
    assert tenants[digest("1")] == tenants[digest("3")] == Tenant("alice", Limits(None, 9))
    assert tenants[digest("2")] == Tenant("bob")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ("max_concurrent=0", "max_concurrent: expected a whole number above 0"),
        ("max_concurrent=9999999999999", "max_concurrent: expected a whole number above 0"),
        ("max_concurrent=1000000000001", "max_concurrent: .* above 0, 1000000000000 at most"),
        ("max_concurrent=-1", "expected a tenant and the SHA-256"),
        ("max_concurrent=x", "expected a tenant and the SHA-256"),
        ("secret_word=1", "expected limits by their names: requests_per_minute, tokens_per_minute"),
        ("max_concurrent=1 max_concurrent=2", "a limit is there twice"),
        ("default_class=urgent", "default_class: expected one of realtime, standard, batch"),
        ("highest_class=1", "highest_class: expected one of realtime, standard, batch"),
        ("max_concurrent=4 default_class=batch", "the tenant has other limits"),
        ("max_concurrent=3", "the tenant has other limits in a line before"),
    ],
)
def test_wrong_limits_are_told_by_their_line(limits: str, says: str) -> None:
    text = f"alice {digest('x')} max_concurrent=4\nalice {digest('y')} {limits}"
    with pytest.raises(ValueError, match=f"line 2: {says}") as caught:
        read_keys(text)
    assert "secret_word" not in str(caught.value)
