"""What `diptych admin` refuses before it asks anybody."""

import pytest

from diptych.cli import admin
from diptych.errors import ConfigurationError


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["drain"], "no command 'drain'"),
        (["roles", "--roles", "decode"], "ADDRESS"),
        (["roles", "worker:1"], "--roles: is required"),
        (["roles", "worker:1", "--roles", "decode,decode"], "--roles: names one twice"),
        (["roles", "worker:1", "--roles", "king"], "--roles"),
        (["roles", "worker:99999", "--roles", "decode"], "--address: .* 65535 .*'worker:99999'"),
        (["roles", "worker:0", "--roles", "decode"], "--address: expected host:port"),
        (["roles", "worker", "--roles", "decode"], "--address: expected host:port"),
        (["roles", "dns:worker:1", "--roles", "decode"], "--address: expected host:port"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(args: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        admin.run(args)


def test_without_a_command_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.run([]) == 0
    assert "diptych admin roles ADDRESS" in capsys.readouterr().out
