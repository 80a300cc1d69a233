"""Resolving ``--model``, and the cache in which an import happens once."""

import errno
import fnmatch
import io
import json
import os
import threading
from pathlib import Path

import pytest

from diptych.errors import ConfigurationError
from diptych.models import cache as model_cache
from diptych.models import importer
from diptych.models import source as model_source
from diptych.models.source import resolve
from diptych.progress import ConsoleProgress, silent
from tests.text_models import write_gguf
from tests.tiny_model import write_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    write_tiny_model(folder, family="llama")
    assert resolve(str(folder), tmp_path / "cache") == (folder.resolve(), "my-model")
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_imported_once(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", family="llama")
    file = tmp_path / "tiny-model.Q4.gguf"
    write_gguf(tmp_path / "tiny", file)
    stages: list[str] = []

    def progress(stage: str, done_ratio: float) -> None:
        stages.append(stage)

    first = resolve(str(file), tmp_path / "cache", progress)
    assert first.name == "tiny-model.Q4"
    assert "converting weights" in stages
    assert {path.name for path in first.folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    stages.clear()
    assert resolve(str(file), tmp_path / "cache", progress) == first
    assert stages == []
    file.touch()  # another file now, for all we know
    assert resolve(str(file), tmp_path / "cache", progress).folder != first.folder


def test_a_gguf_file_may_have_a_name_that_is_not_all_characters(tmp_path: Path) -> None:
    """As one of a system before UTF-8: clients call the model something that can be said."""
    write_tiny_model(tmp_path / "tiny", family="llama")
    file = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    write_gguf(tmp_path / "tiny", file)
    found = resolve(str(file), tmp_path / "cache")
    assert found.name == "caf?"
    assert (found.folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("nowhere.gguf", "No such file"),
        ("./nowhere", "not a hub id"),
        ("/no/such/folder", "not a hub id"),
        ("smollm", "not a hub id"),
        ("org/name@", "not a hub id"),
        ("org/name@a@b", "not a hub id"),
        ("", "is empty"),
        ("~nobody-of-that-name/model", "home directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_no_model_gets_one_line(tmp_path: Path, model: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        resolve(model, tmp_path)
    assert "\n" not in caught.value.message


def test_a_cache_in_a_home_that_nobody_has_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    for model in ("demo", "org/name", str(tmp_path / "a.gguf")):
        with pytest.raises(ConfigurationError, match=r"model cache: .*home directory"):
            resolve(model, Path("~nobody-of-that-name"))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        resolve(str(tmp_path), tmp_path)


def test_the_hubs_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> str:
        raise OSError("no network\nmore about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigurationError, match=r"'org/name'.*no network more about it$"):
        resolve("org/name", tmp_path)


def test_what_may_want_a_token_says_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    class RepositoryNotFoundError(Exception):
        """As the hub's client has it, whose first line is a number."""

    def refused(*args: object, **kwargs: object) -> str:
        raise RepositoryNotFoundError("401 Client Error.\n\nRepository Not Found for url: x.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    said = r"401 .* Not Found for url: x\. .*HF_TOKEN"
    with pytest.raises(ConfigurationError, match=said) as caught:
        resolve("org/name", tmp_path)
    assert "\n" not in caught.value.message


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub, for its real client: each question fails as where there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def left_by_another(cache: Path, *names: str) -> Path:
    """The folder of a model as a client of the hub leaves it that keeps no list of its files."""
    model = cache / "hub" / "models--org--name"
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("model", ["org/name", f"org/name@{COMMIT}"])
def test_without_a_hub_what_is_there_whole_is_used_whoever_fetched_it(
    tmp_path: Path, model: str
) -> None:
    folder = left_by_another(tmp_path, "config.json", "model.safetensors")
    for texts_only in (True, False):
        assert resolve(model, tmp_path, texts_only=texts_only).folder == folder


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("model", ["org/name", f"org/name@{COMMIT}"])
def test_without_a_hub_half_of_a_model_is_none(tmp_path: Path, model: str) -> None:
    folder = left_by_another(tmp_path, "config.json", "model-1.safetensors")
    with pytest.raises(ConfigurationError, match="offline mode"):
        resolve(model, tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="offline mode"):
        resolve(model, tmp_path)
    assert resolve(model, tmp_path, texts_only=True).folder == folder
    (folder / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="offline mode"):
        resolve(model, tmp_path, texts_only=True)


_OTHER_FORMATS = (
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/consolidated.safetensors",
    "original/params.json",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json",
    "model.fp16.safetensors",
    "model-Q4_K_M.gguf",
    "onnx/config.json",
    "tf_model.h5",
)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_hub_is_asked_for_the_weights_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    """Some repositories hold them a second time, in the format of their makers."""
    import huggingface_hub

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    used = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    used |= {"chat_template.jinja", "LICENSE"}
    remote = dict.fromkeys([*used, *_OTHER_FORMATS], "{}")
    if is_sharded:
        weight_map = {"a": shards[0], "b": shards[1], "c": shards[0]}
        remote |= dict.fromkeys([*shards, "model-00003-of-00003.safetensors"], "")
        remote["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map})
        used |= {*shards, "model.safetensors.index.json"}
    else:
        used.add("model.safetensors")
        remote["model.safetensors"] = ""
    snapshot = tmp_path / "0123abcd"

    def matches(file: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

    def fetch(
        name: str,
        *,
        cache_dir: Path,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None = None,
        revision: str | None = None,
        tqdm_class: type[object],
    ) -> str:
        assert name == "org/name"
        assert revision in (None, snapshot.name)
        snapshot.mkdir(exist_ok=True)
        for file, content in remote.items():
            if matches(file, allow_patterns) and not matches(file, ignore_patterns or []):
                (snapshot / file).parent.mkdir(exist_ok=True)
                (snapshot / file).write_text(content)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("org/name", tmp_path).folder == snapshot
    fetched = {str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file()}
    assert fetched == used


@pytest.mark.parametrize("revision", ["0123abcd", "v1.0", "refs/pr/1", None])
def test_a_revision_is_what_the_hub_is_asked_for_and_not_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    import huggingface_hub

    asked: list[tuple[str, object]] = []

    def fetch(name: str, *, revision: str | None = None, **_: object) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model = "org/name" if revision is None else f"org/name@{revision}"
    assert resolve(model, tmp_path / "cache").name == "org/name"
    assert asked == [("org/name", revision), ("org/name", tmp_path.name)]


def test_a_revision_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fetch(*args: object, **kwargs: object) -> str:
        raise OSError("Revision Not Found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConfigurationError, match=r"'org/name@v9'.*Revision Not Found$"):
        resolve("org/name@v9", tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_names_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    import huggingface_hub

    def fetch(name: str, **_: object) -> str:
        (tmp_path / "model.safetensors.index.json").write_text(content)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConfigurationError, match="'org/name'"):
        resolve("org/name", tmp_path)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diptych.models.gguf_import", None)
    with pytest.raises(ConfigurationError, match=r"pip install -e '\.\[worker\]'"):
        importer.load_importer()


def test_the_demo_is_found_without_the_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "diptych.models.gguf_import", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        resolve("demo", tmp_path)
    [lock] = (tmp_path / "models").iterdir()
    lock.with_suffix("").mkdir()  # as if imported before
    assert resolve("demo", tmp_path) == (lock.with_suffix(""), "SmolLM2-135M-Instruct")


def test_several_at_once_write_once(tmp_path: Path) -> None:
    started, release = threading.Event(), threading.Event()
    waiting = threading.Semaphore(0)
    writes, folders = [], []

    def write(folder: Path) -> None:
        writes.append(folder)
        started.set()
        assert release.wait(10)
        (folder / "config.json").write_text("{}")

    def progress(stage: str, done_ratio: float) -> None:
        waiting.release()

    def resolve_once() -> None:
        folders.append(model_cache.cached_folder(tmp_path, "m", write, progress))

    threads = [threading.Thread(target=resolve_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    for _ in range(3):  # the others found the lock taken
        assert waiting.acquire(timeout=10)
    release.set()
    for thread in threads:
        thread.join(10)
    assert len(writes) == 1
    assert folders == [tmp_path / "models" / f"m-v{model_cache.FORMAT_VERSION}"] * 4
    assert (folders[0] / "config.json").read_text() == "{}"


def test_waiting_can_be_given_up(tmp_path: Path) -> None:
    class GivenUpError(Exception):
        pass

    def give_up(stage: str, done_ratio: float) -> None:
        raise GivenUpError

    def write(folder: Path) -> None:
        with pytest.raises(GivenUpError):
            model_cache.cached_folder(tmp_path, "m", write, give_up)

    model_cache.cached_folder(tmp_path, "m", write, silent)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ConfigurationError("broken")

    with pytest.raises(ConfigurationError, match="broken"):
        model_cache.cached_folder(tmp_path, "m", fail, silent)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [
        f"m-v{model_cache.FORMAT_VERSION}.lock"
    ]


def test_the_remains_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    partial = tmp_path / "models" / f"m-v{model_cache.FORMAT_VERSION}.partial"
    partial.mkdir(parents=True)
    (partial / "half").write_text("x")
    folder = model_cache.cached_folder(tmp_path, "m", lambda folder: None, silent)
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigurationError, match="model cache"):
        model_cache.cached_folder(tmp_path / "cache", "m", lambda folder: None, silent)


def test_progress_is_a_few_plain_lines_elsewhere_than_on_a_terminal() -> None:
    stream = io.StringIO()
    with ConsoleProgress(stream) as progress:
        for hundredth in range(101):
            progress("loading", hundredth / 100)
        progress("loading", 1.0)
    assert stream.getvalue().splitlines() == [
        f"loading: {percent}%" for percent in (0, 25, 50, 75, 100)
    ]


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EPIPE])
def test_work_goes_on_where_its_progress_cannot_be_written(why: int) -> None:
    """As with the log, which may go to the same full disk, or to nobody."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(why, os.strerror(why))

    with ConsoleProgress(Broken()) as progress:
        progress("loading", 0.0)
        progress("loading", 1.0)


def test_progress_is_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ConsoleProgress(stream) as progress:
        progress("loading", 0.5)
        progress("loading", 1.0)
    assert "loading" in stream.getvalue()
    assert "100 %" in stream.getvalue()


def test_the_default_cache_is_the_users() -> None:
    assert str(model_source.DEFAULT_CACHE_DIR) == "~/.cache/diptych"
