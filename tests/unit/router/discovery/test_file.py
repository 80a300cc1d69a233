"""Workers from a file that somebody replaces, breaks and repairs. No sleeps: the test is asked."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from router.discovery import file
from router.discovery.file import FileDiscovery, FileSet, read_targets
from router.discovery.source import Targets
from router.placement.place import Place
from tests.unit.router.discovery.scripted import ScriptIsOverError, told_by

FIRST = b'{"prefill": ["p0:1"], "decode": ["d0:1"]}'
SECOND = b"prefill: [p0:1]\ndecode: [d0:1, d1:1]\n"


def targets(*decode: str, prefill: tuple[str, ...] = ("p0:1",)) -> Targets:
    return Targets(prefill=frozenset(prefill), decode=frozenset(decode))


def test_yaml_and_json_say_the_same() -> None:
    assert read_targets(FIRST) == targets("d0:1")
    assert read_targets(SECOND) == targets("d0:1", "d1:1")
    without = read_targets(b"decode: [d0:1]")
    assert without == Targets(decode=frozenset({"d0:1"}), has_prefill_pool=False)
    assert read_targets(b"{prefill: [], decode: []}") == Targets()


def test_an_address_may_say_where_it_is() -> None:
    data = b"decode: [{address: d0:1, zone: a, nvlink_domain: rack-7}, d1:1, {address: d2:1}]"
    told = read_targets(data)
    assert told.decode == {"d0:1", "d1:1", "d2:1"}
    assert told.places == {"d0:1": Place("a", "rack-7")}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file: .*valid dictionary"),
        (b"prefill: [p0:1]", "decode: Field required"),
        (b"decode: d0:1", "decode: .*list"),
        (b"decode: [d0]", "decode: expected host:port, found 'd0'"),
        (b"decode: [d0:1, d0:1]", "decode: an address is listed twice"),
        (b"decode: [d0:1, 7]", "decode: expected host:port, found '7'"),
        (b"decode: [d0:1, [d1:1]]", r"decode\.1: .*string"),
        (b"decode: [{zone: a}]", r"decode\.0\.address: Field required"),
        (b"decode: [{address: d0:1, rack: a}]", r"decode\.0\.rack: Extra"),
        (b"decode: [{address: d0:1, zone: [a]}]", r"decode\.0\.zone: .*string"),
        (b"decode: [d0:1, {address: d0:1}]", "decode: an address is listed twice"),
        (b"decode: !!timestamp soon", "decode: .*list"),
        (b"decode: &all [*all]", "not YAML: .*recursive"),
        (b"decode: [d0:1]\nprefill:", "prefill: .*list"),
        (b"{decode: [d0:1], decoder: []}", "decoder: Extra"),
        (b"decode: [d0:1", "not YAML: "),
        (b'decode: ["\\UFFFFFFFF"]', "not YAML: "),
        (b'decode: ["\\ud800:1"]', "decode: expected host:port"),
        (b'decode: ["d 0:1"]', "decode: expected host:port"),
        (b'decode: ["unix:1"]', "decode: expected host:port"),
        (b'decode: ["dns:d0:1"]', "decode: expected host:port"),
        (b"\xff\xfe\x00", "not YAML: "),
        (b"[" * 100_000, "not YAML: "),
        (b"#" * 2**21, "longer than 262144 bytes"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_field(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_targets(data)
    assert "\n" not in str(caught.value)


def test_a_file_that_goes_wrong_changes_nothing_and_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = FileSet("workers.yaml")
    assert known.look(FIRST) == targets("d0:1")
    assert known.look(FIRST) is None
    for _ in range(3):
        assert known.look(FileNotFoundError(2, "No such file")) is None
        assert not known.is_right
    for _ in range(3):
        assert known.look(b"decode: []\nx: 1") is None
    assert [record.why for record in caplog.records] == [  # type: ignore[attr-defined]
        "No such file",
        "x: Extra inputs are not permitted",
    ]
    assert known.look(FIRST) is None, "it is as before"
    assert known.is_right
    assert known.look(SECOND) == targets("d0:1", "d1:1")
    assert known.look(SECOND + b"# the same") is None


def test_a_wrong_file_is_read_once_and_told_of_again_after_a_right_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[bytes] = []

    def read_and_noted(data: bytes) -> Targets:
        read.append(data)
        return read_targets(data)

    monkeypatch.setattr(file, "read_targets", read_and_noted)
    known, wrong = FileSet("workers.yaml"), b"decode: 1"
    for _ in range(2):
        known.look(FIRST)
        for _ in range(3):
            assert known.look(wrong) is None
            assert not known.is_right
    known.look(FIRST)
    assert known.is_right
    assert read == [FIRST, wrong, wrong]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("found", [FileNotFoundError(2, "No such file"), b"decode: 1"])
def test_a_file_that_never_was_right_stops_the_process(found: bytes | OSError) -> None:
    with pytest.raises(ConfigurationError, match=r"--file\.path: workers\.yaml: "):
        FileSet("workers.yaml").look(found)


class Looks:
    """A discovery between whose looks the test does something."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.between: list[Callable[[], object]] = []
        self.discovery = FileDiscovery(
            path, interval_s=2.0, clock=lambda: self.now_s, sleep=self._sleep
        )

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if not self.between:
            raise ScriptIsOverError
        self.between.pop(0)()

    async def told(self) -> list[Targets]:
        return await told_by(self.discovery)


async def test_a_file_that_is_replaced_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(FIRST)
    looks = Looks(path)

    def replace(data: bytes) -> None:
        beside = tmp_path / "new"
        beside.write_bytes(data)
        beside.replace(path)

    looks.between = [lambda: None, lambda: replace(SECOND), path.unlink, lambda: replace(FIRST)]
    assert await looks.told() == [targets("d0:1"), targets("d0:1", "d1:1"), targets("d0:1")]


async def test_a_mounted_config_map_is_followed(tmp_path: Path) -> None:
    """Kubernetes swaps a link to a folder, which the file's own link leads through."""
    for name, data in (("..1", FIRST), ("..2", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.yaml").write_bytes(data)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "workers.yaml").symlink_to("..data/workers.yaml")

    def swap() -> None:
        (tmp_path / "..tmp").symlink_to("..2")
        os.replace(tmp_path / "..tmp", tmp_path / "..data")

    looks = Looks(tmp_path / "workers.yaml")
    looks.between = [swap]
    assert await looks.told() == [targets("d0:1"), targets("d0:1", "d1:1")]


async def test_ten_minutes_without_the_file_change_nothing_but_its_age(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(FIRST)
    looks = Looks(path)
    looks.between = [lambda: None, path.unlink, *(300 * [lambda: None])]
    assert await looks.told() == [targets("d0:1")]
    assert looks.discovery.age_s == 2.0 * 302


async def test_a_folder_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match="not a file"):
            await anext(FileDiscovery(path, interval_s=1, clock=lambda: 0.0).targets())
