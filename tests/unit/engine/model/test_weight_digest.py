"""Every byte of every weight counts, however a model's files are read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.engine.kv.fingerprint import model_digest
from diptych.engine.model import checkpoint
from diptych.engine.model.checkpoint import mapped_shards
from diptych.engine.model.config import ModelConfig
from diptych.engine.model.rank_share import RankShare
from diptych.engine.model.ranks import OneRank
from diptych.engine.model.shard import MappedShard
from diptych.engine.model.weights import DecoderWeights, load_weights
from diptych.errors import ConfigurationError
from diptych.text.identity import read_config
from tests.engines import PLAIN
from tests.tiny_model import write_tiny_model

V_PROJ = "model.layers.1.self_attn.v_proj.weight"


class OneOfTwo(OneRank):
    """Reads half of a model; what the other one does is of no concern here."""

    def __init__(self, rank: int) -> None:
        self.share = RankShare(rank, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def load(folder: Path, rank: int | None = None, **asked: Callable[[float], None]) -> DecoderWeights:
    config, store = ModelConfig.from_folder(folder), PLAIN.weights(torch.float32, "none")
    ranks = OneRank() if rank is None else OneOfTwo(rank)
    return load_weights(folder, config, store, ranks=ranks, **asked)


def digest_of(folder: Path) -> str:
    return model_digest(read_config(folder / "config.json"), load(folder).source.digest)


def replace_weights(folder: Path, seed: int = 1) -> None:
    """As a rollout does: the name is another file's from one moment to the next."""
    other = write_tiny_model(folder.parent / f"other-{seed}", seed=seed)
    (other / "model.safetensors").rename(folder / "model.safetensors")


def test_models_are_told_apart(folder: Path, tmp_path: Path) -> None:
    digest = digest_of(folder)
    assert len(digest) == 32
    assert digest_of(write_tiny_model(tmp_path / "same", name="renamed")) == digest
    assert digest_of(write_tiny_model(tmp_path / "seed", seed=1)) != digest
    assert digest_of(write_tiny_model(tmp_path / "family", "qwen2")) != digest
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert digest_of(folder) != digest


def test_every_byte_counts(folder: Path) -> None:
    """The lowest bit of the first, of some inner and of the last number of each tensor."""
    digests, path = {load(folder).source.digest}, folder / "model.safetensors"
    (shard,) = mapped_shards(folder).values()
    places = [
        location.offset + place
        for _, location in shard.index()
        for place in (0, location.num_bytes // 3 * 2, location.num_bytes - 4)
    ]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            for now in (byte ^ 1, byte):
                file.seek(place)
                file.write(bytes([now]))
                file.flush()
                if now != byte:
                    digests.add(load(folder).source.digest)
    assert len(digests) == 1 + len(places)


def test_a_fine_tune_of_one_projection_is_another_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1024}
    folder = write_tiny_model(tmp_path / "model", num_layers=8, shape=shape)
    digest = digest_of(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[V_PROJ] = tensors[V_PROJ].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert digest_of(folder) != digest


def test_a_rank_that_reads_a_part_digests_the_whole(folder: Path) -> None:
    whole, first, second = load(folder), load(folder, 0), load(folder, 1)
    assert first.source == whole.source
    assert second.source == whole.source._replace(digest="")


def test_it_is_of_what_was_loaded_whatever_the_folder_has_then(folder: Path) -> None:
    before = load(folder)
    replace_weights(folder)
    after = load(folder)
    assert before.source.digest != after.source.digest
    assert before.source.files != after.source.files


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_change_while_they_are_read_are_not_used(folder: Path, in_place: bool) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()

    def change(ratio: float) -> None:
        if ratio < 1:
            return
        if in_place:
            with path.open("r+b") as file:
                file.write(content)
        else:
            replace_weights(folder)

    with pytest.raises(ConfigurationError, match="changed while its weights were read: start"):
        load(folder, progress=change)


def test_a_header_is_that_of_the_file_whose_tensors_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the name is another file's as soon as the first one is open."""
    want = load(folder)

    class Replaced(MappedShard):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            write_tiny_model(folder.parent / "wide", vocab_size=1024)
            (folder.parent / "wide" / "model.safetensors").rename(path)

    monkeypatch.setattr(checkpoint, "MappedShard", Replaced)
    monkeypatch.setattr(MappedShard, "has_changed", lambda shard: False)
    assert load(folder).source.digest == want.source.digest


def test_loading_that_is_given_up_leaves_no_thread(folder: Path) -> None:
    def give_up(ratio: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        load(folder, progress=give_up)
