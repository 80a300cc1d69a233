"""Scripts of faults: refused unless allowed, and firing exactly where they say."""

import random
from collections.abc import Callable, Sequence

import grpc
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.telemetry.metrics import Metrics
from diptych.v1 import kv_source_pb2
from kvtransfer.config import TransferConfig
from kvtransfer.memory import HostMemory
from kvtransfer.testing import effects as damage
from kvtransfer.testing.canaries import Canaries
from kvtransfer.testing.fault_service import serve_faults
from kvtransfer.testing.faults import FaultScript, parse_rules

RULES = '[{"at": "range", "do": "corrupt"}]'


def test_faults_and_tcp_are_refused_unless_allowed() -> None:
    for setting in ({"faults": RULES}, {"allow_nixl_tcp": True}):
        with pytest.raises(ValidationError, match="needs allow_faults"):
            TransferConfig.model_validate(setting)
        TransferConfig.model_validate({**setting, "allow_faults": True})


@pytest.mark.parametrize(
    ("rules", "where"),
    [
        ('[{"at": "range"}]', r"rules\[0\].do"),
        ('[{"at": "opened", "do": "hang"}]', "possible at read only"),
        ('[{"at": "read", "do": "delay", "seconds": 2, "seconds_max": 1}]', "less than"),
        ('[{"at": "range", "do": "drop", "twice": 1}]', r"rules\[0\].twice"),
        ("{}", "rules"),
    ],
)
async def test_a_wrong_rule_is_named(rules: str, where: str) -> None:
    with pytest.raises(InvalidRequestError, match=where):
        parse_rules(rules)
    config = TransferConfig(allow_faults=True, faults=rules)
    with pytest.raises(ConfigurationError, match=rf"transfer\.faults.*{where}"):
        serve_faults(config, grpc.aio.server(), Metrics(CollectorRegistry()))


def test_a_rule_fires_at_its_place_and_no_more_often_than_it_says() -> None:
    script = FaultScript(
        parse_rules(
            '[{"at": "range", "do": "drop", "nth": 2, "num_tokens": 5},'
            ' {"at": "range", "do": "delay", "seconds": 1, "seconds_max": 2, "times": null}]'
        )
    )
    other, mine, again = script.of_pull(4), script.of_pull(5), script.of_pull(5)
    assert other.at("opened") is None
    first = other.at("range")
    assert first is not None
    assert first.do == "delay"
    assert 1 <= first.seconds <= 2
    assert other.at("range") is None  # not the first any more, and not mine
    mine.at("range")
    second = mine.at("range")
    assert second is not None
    assert second.do == "drop"
    again.at("range")
    assert again.at("range") is None  # it has fired once
    assert script.num_fired == [1, 3]


def test_damage_changes_what_it_says() -> None:
    rng = random.Random(1)
    announced = kv_source_pb2.Range(
        first_token=16, block_ids=[4, 5], digests=[b"a" * 16, b"b" * 16], last=True
    )
    for field in ("", "first_token", "block_ids", "last"):
        changed = kv_source_pb2.Range()
        changed.CopyFrom(announced)
        damage.corrupted(changed, field, rng)
        differing = [
            f.name
            for f in announced.DESCRIPTOR.fields
            if getattr(changed, f.name) != getattr(announced, f.name)
        ]
        assert differing == [field or "digests"]
    damage.truncated(announced, "")
    assert list(announced.digests) == [b"a" * 16]
    confirm = kv_source_pb2.Confirm(digest=b"c" * 16)
    damage.truncated(confirm, "")
    assert confirm.digest == b"c" * 8
    blocks = [memoryview(bytearray(b"a" * 8)), memoryview(bytearray(b"b" * 8))]
    damage.swap_halves(blocks)
    assert [bytes(block) for block in blocks] == [b"bbbbaaaa", b"bbbbaaaa"]


class Pool:
    """Four blocks, some free."""

    num_blocks = 4
    on_handed_out: Callable[[Sequence[int]], None] | None = None

    def __init__(self) -> None:
        self.free = {0, 1, 2}
        self.generations = [0] * 4

    def is_free(self, block_id: int) -> bool:
        return block_id in self.free

    def generation(self, block_id: int) -> int:
        return self.generations[block_id]


def test_a_canary_changes_only_when_a_free_block_is_written() -> None:
    pool, memory = Pool(), HostMemory(bytearray(4 * 20), 20)
    canaries = Canaries(pool, memory)
    canaries.look()
    assert canaries.num_painted == 3
    pool.free.remove(1)
    pool.generations[1] += 1
    memory.block(1)[:] = b"x" * 20  # its holder
    canaries.look()
    pool.free.add(1)
    canaries.look()
    assert (canaries.num_painted, canaries.num_changed) == (3, 0)
    memory.block(1)[3] ^= 1
    canaries.look()
    assert canaries.num_changed == 1
