"""A runner that is asked for the next step before this one is waited for draws the same tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from diptych.engine.backends.base import Backend
from diptych.engine.backends.torch.linear import PlainLinear
from diptych.engine.kv.cache import KVCache
from diptych.engine.runner import Runner
from diptych.engine.sampling.device_draws import DeviceDraws
from diptych.engine.sampling.logit_edits import Unseen
from diptych.engine.sampling.sampler import sample
from diptych.engine.scheduling.block_pool import BlockPool
from diptych.engine.scheduling.report import LogprobsReport, Told
from diptych.engine.scheduling.run_ahead import awaited
from diptych.engine.scheduling.sequence import Sequence as Generated
from diptych.engine.scheduling.sequence import SequenceKey
from diptych.engine.scheduling.step import Chunk, SampleSpec, StepPlan
from diptych.errors import LogitsError
from diptych.sampling_params import SamplingParams
from diptych.token_logprobs import PromptLogprobs, TokenLogprobs
from tests.engines import PLAIN, AheadBackend, load_decoder
from tests.step_rig import StepRig
from tests.tiny_model import write_tiny_model

BLOCK_SIZE = 8
BAD_WORDS = frozenset({(7, 7), (3,), (9, 7), (7, 8, 7)})
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FILTERED = SamplingParams(top_k=40, top_p=0.9, seed=9, max_tokens=20)
# Random weights say the same over and over: penalties of what was said last change it each time.
EDITED = [
    SamplingParams(temperature=0.0, frequency_penalty=0.7, logprobs=2, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20),
    SamplingParams(presence_penalty=2.0, repetition_penalty=0.9, seed=5, top_k=9, max_tokens=20),
    SamplingParams(temperature=0.0, bad_words=BAD_WORDS, logit_bias={7: 9.0}, max_tokens=20),
    SamplingParams(
        temperature=0.0, stop_token_ids=frozenset(range(250)), min_tokens=9, max_tokens=20
    ),
    SamplingParams(seed=3, logprobs=0, max_tokens=20),
]
PLAIN_DRAWS = [SamplingParams(seed=seed, max_tokens=20) for seed in range(4)]


def make_rig(folder: Path, backend: Backend, num_blocks: int) -> StepRig:
    """All is NaN that nobody wrote."""
    decoder = load_decoder(folder, backend=backend)
    cache = KVCache(decoder.config, num_blocks, BLOCK_SIZE, decoder.dtype)
    cache.tensor.fill_(torch.nan)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    runner = Runner(decoder, cache, backend)
    return StepRig(runner, pool, min(96, num_blocks * BLOCK_SIZE), backend.steps_in_flight)


def prompts(*lengths: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(7)
    return [torch.randint(5, 500, (length,), generator=made).tolist() for length in lengths]


@pytest.fixture
def each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of products do not depend on which rows a step has, as they do on some processors."""
    together = PlainLinear.__call__

    def one_by_one(linear: PlainLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows = torch.cat([together(linear, row.clone()) for row in torch.split(x, 1)])
        return rows if out is None else out.copy_(rows)

    monkeypatch.setattr(PlainLinear, "__call__", one_by_one)


@pytest.mark.usefixtures("each_row_alone")
@pytest.mark.parametrize(
    ("params", "num_blocks", "is_ahead"),
    [
        ([GREEDY, *PLAIN_DRAWS, FILTERED], 64, True),
        ([GREEDY, *PLAIN_DRAWS], 18, True),  # somebody is preempted
        ([GREEDY, SamplingParams(return_margins=True, max_tokens=3), *PLAIN_DRAWS], 64, True),
        ([GREEDY, SamplingParams(temperature=0.0, return_margins=True)], 64, False),
        (EDITED, 64, True),
        (EDITED[:5], 18, True),
    ],
    ids=[
        "drawn by the device",
        "preempted",
        "one of the host's ends",
        "margins",
        "penalties and words",
        "penalties and words, preempted",
    ],
)
def test_the_same_tokens_as_with_one_step_at_a_time(
    params: list[SamplingParams], num_blocks: int, is_ahead: bool, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    rigs = [make_rig(tmp_path, backend, num_blocks) for backend in (PLAIN, AheadBackend())]
    answers = []
    for rig in rigs:
        given = prompts(9, 30, 17, 5, 21, 8)
        seqs = [rig.add(at, given[at], each) for at, each in enumerate(params)]
        rig.run()
        answers.append([(seq.token_ids, seq.num_preemptions > 0) for seq in seqs])
        assert rig.scheduler.pool.counts().running == 0
    assert [tokens for tokens, _ in answers[1]] == [tokens for tokens, _ in answers[0]]
    told = [
        {
            (update.sequence.key, update.position): update.token.logprobs
            for update in rig.updates
            if update.token is not None
        }
        for rig in rigs
    ]
    assert told[0] == told[1]
    assert (rigs[1].num_ahead > 10) is is_ahead
    assert any(preempted for _, preempted in answers[1]) is (num_blocks == 18)


def test_what_a_prompt_is_to_report_comes_from_its_own_step(tmp_path: Path) -> None:
    """Even where the next one has been computed since."""
    write_tiny_model(tmp_path, "llama", num_layers=1)
    told = []
    for backend in (PLAIN, AheadBackend()):
        rig = make_rig(tmp_path, backend, 64)
        (asked, other) = prompts(60, 20)
        seq = Generated(
            key=SequenceKey("router", 1),
            token_ids=asked,
            num_prompt_tokens=len(asked),
            sampling=SamplingParams(max_tokens=1),
            prefill_only=True,
            report=LogprobsReport(1, len(asked), 2),
        )
        rig.scheduler.add_prefill(seq)
        rig.add(2, other, GREEDY)
        while seq.num_output_tokens == 0:
            rig.step()
        rig.scheduler.release(seq)
        rig.run()
        reports = [update.report for update in rig.updates if update.report is not None]
        told.append([part for report in reports for part in logprobs_of(report)])
        assert len(told[-1]) == 59
    assert told[0] == told[1]


def logprobs_of(report: Told) -> Sequence[TokenLogprobs]:
    assert isinstance(report, PromptLogprobs)
    return report.logprobs


def test_a_device_draws_what_the_host_would() -> None:
    """All temperatures and filters; rows of odd widths, ties, and one without numbers."""
    made = torch.Generator().manual_seed(3)
    for vocab_size in (3, 511, 512, 513, 5000):
        logits = torch.randn(24, vocab_size, generator=made) * 4
        logits[0] = 1.5  # all alike: the lowest id
        logits[1, 1:] = float("-inf")
        logits[2, 0] = float("nan")
        specs = [
            SampleSpec(
                params=SamplingParams(
                    temperature=(row % 4) * 0.5,
                    seed=row * 7,
                    top_k=(0, 0, 2, 700)[row // 4 % 4],
                    top_p=(1.0, 0.6, 0.9)[row // 8],
                    min_p=0.02 * (row // 12),
                ),
                allow_stop=True,
            )
            for row in range(24)
        ]
        assert all(awaited(spec.params) is None for spec in specs)
        positions = list(range(100, 124))
        drawn = DeviceDraws.of(logits.clone(), specs, positions)
        wanted = sample(logits.clone(), specs, positions)
        assert isinstance(drawn.tell()[2], LogitsError)
        for row, (token, other) in enumerate(zip(drawn.tell(), wanted, strict=True)):
            if row != 2:
                assert not isinstance(token, LogitsError)
                assert not isinstance(other, LogitsError)
                assert token.token_id == other.token_id == drawn.token_ids[row]
        assert 0 <= drawn.token_ids[2] < vocab_size, "the next step looks it up"


class WatchedDraws(AheadBackend):
    """Knows what it drew from, and keeps nothing of it."""

    drawn_from: StorageWeakRef

    def draw(
        self,
        logits: torch.Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        unseen: Unseen | None = None,
    ) -> DeviceDraws:
        storage = logits.untyped_storage()
        self.drawn_from = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return super().draw(logits, specs, positions, unseen)


def test_logits_that_the_device_drew_from_are_not_kept_until_the_step_is_waited_for(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path, "qwen3", num_layers=1)
    backend = WatchedDraws()
    runner = make_rig(tmp_path, backend, 4).runner
    spec = SampleSpec(params=GREEDY, allow_stop=True)
    chunk = Chunk(token_ids=(5,), start=0, block_table=(0,), sample=spec)
    step = runner.launch(StepPlan(chunks=(chunk,)))
    assert backend.drawn_from.expired()  # type: ignore[no-untyped-call]
    assert step.wait().tokens[0] is not None
