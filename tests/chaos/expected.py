"""What a load answers when nothing goes wrong, and whether other answers are the same."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from diptych.rpc.channel import open_channel
from tests.call import Answer, generate
from tests.chaos.load import Job, run_all
from tests.cluster import Cluster
from tests.golden_rule import Run, check_exact_later, near_tie


@dataclass
class Expected:
    """The undisturbed answers to ``work``, and the near ties found in others so far.

    ``check`` never waits, so it may be called while the load runs. What follows a near tie is
    proven by ``settle``, once the cluster is undisturbed again: every test ends with it.
    """

    work: Sequence[Job]
    answers: Sequence[Answer]
    num_checked: int = 0
    _tied: list[tuple[int, list[int]]] = field(default_factory=list)  # job, and its other answer

    @classmethod
    async def learn(
        cls, cluster: Cluster, work: Sequence[Job], *, concurrency: int = 8
    ) -> "Expected":
        """Ask everything once."""
        answers = await run_all(cluster, work, concurrency=concurrency)
        for answer in answers:
            assert answer.error is None, answer.error
        return cls(work, answers)

    def check_all(self, answers: Sequence[Answer]) -> None:
        """Every job was answered, in the order of ``work``."""
        assert len(answers) == len(self.work)
        for index, answer in enumerate(answers):
            self.check(index, answer)

    def check(self, index: int, answer: Answer) -> None:
        """The job was answered, with the same tokens and for the same reason."""
        assert answer.error is None, f"job {index}: {answer.error}"
        want = self.answers[index]
        is_tied = self._check_tokens(index, answer.token_ids, Run(want.token_ids, want.margins))
        assert is_tied or answer.text == want.text, f"job {index}"
        assert answer.finish_reason == want.finish_reason, f"job {index}"

    def check_cut_short(self, index: int, answer: Answer) -> None:
        """The tokens that came before the job failed, if any, are the same."""
        num, want = len(answer.token_ids), self.answers[index]
        self._check_tokens(index, answer.token_ids, Run(want.token_ids[:num], want.margins[:num]))

    def _check_tokens(self, index: int, got: list[int], want: Run) -> bool:
        self.num_checked += 1
        is_tied = near_tie(got, want, f"job {index}") is not None
        if is_tied:
            self._tied.append((index, got))
        return is_tied

    async def settle(self, cluster: Cluster) -> int:
        """Prove what followed each near tie; how many there were. Few are allowed."""
        async with open_channel(cluster.router.address) as channel:
            for index, token_ids in self._tied:
                await self._settle(channel, index, token_ids)
        num_ties = len(self._tied)
        assert num_ties <= max(1, self.num_checked // 40), f"{num_ties} of {self.num_checked}"
        return num_ties

    async def _settle(self, channel: grpc.aio.Channel, index: int, got: list[int]) -> None:
        job, want = self.work[index], self.answers[index]

        async def resume(prefix: Sequence[int]) -> Run:
            num_left = len(got) - len(prefix)
            if not num_left:
                return Run([], [])
            rest = replace(job, token_ids=(*job.token_ids, *prefix), max_tokens=num_left)
            answer = await generate(channel, rest.request(salt=secrets.token_hex(8)))
            assert answer.error is None, answer.error
            return Run(answer.token_ids, answer.margins)

        num = len(got)
        run = Run(want.token_ids[:num], want.margins[:num])
        await check_exact_later(got, run, f"job {index}", resume)
