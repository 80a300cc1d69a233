"""Which of the models that workers have is served, and who has it. Pure but for its log."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

from diptych.v1.worker_pb2 import WORKER_ROLE_DECODE
from router.cluster.member import Gate

logger = logging.getLogger(__name__)

_LEAST_LEN: Final = 2  # a token of a prompt, and one of its answer


class ModelChoice:
    """The model of most ready workers that can run it, by the router's own tokenizer and config.

    One that was restarted with other weights is left out, and not all the others; once most
    have the new ones, those are served; but none that no worker decodes, while another one is: of
    two pools one may have the new ones first. Of a worker that is left out the log tells once, as
    long as it is a member.
    """

    def __init__(self, text_digest: str) -> None:
        """``text_digest`` is of the router's tokenizer and config."""
        self._text_digest = text_digest
        self._digest: str | None = None  # of the model that is served; None: none was seen
        self._complained: dict[str, str] = {}  # at an address, of that incarnation

    @property
    def digest(self) -> str:
        """Of what is served; empty: nothing was seen."""
        return self._digest or ""

    def choose(self, ready: Iterable[Gate]) -> None:
        """Look at all workers that are ready; of two equal groups the served one stays."""
        fit = [gate for gate in ready if self._unfit(gate) is None]
        decoded = {gate.model_digest for gate in fit if WORKER_ROLE_DECODE in gate.roles}
        digests = (gate.model_digest for gate in fit)
        groups = Counter(each for each in digests if each in decoded or not decoded)
        if not groups or groups[self._digest or ""] == max(groups.values()):
            return
        self._digest = max(sorted(groups), key=lambda digest: groups[digest])
        logger.info("model served", extra={"model_digest": self._digest})

    def may_use(self, gate: Gate) -> bool:
        """Whether a ready worker has what is served."""
        unfit = self._unfit(gate)
        if unfit is not None:
            self._complain(gate, unfit)
            return False
        if gate.model_digest != self._digest:
            self._complain(gate, "another model than most workers': not used")
            return False
        return True

    def forget(self, address: str) -> None:
        """No worker is there any more; what comes there later is complained of anew."""
        self._complained.pop(address, None)

    def _unfit(self, gate: Gate) -> str | None:
        """Why the worker is of no use, whichever model it has; one that says no text is trusted."""
        if gate.max_model_len < _LEAST_LEN:
            return "no room for a prompt and an answer: not used"
        if gate.text_digest and gate.text_digest != self._text_digest:
            return "another tokenizer or config than this router's: not used"
        return None

    def _complain(self, gate: Gate, what: str) -> None:
        if gate.worker is None:
            return
        address, incarnation = gate.worker
        if self._complained.get(address) == incarnation:
            return
        self._complained[address] = incarnation
        theirs = {"model_digest": gate.model_digest, "text_digest": gate.text_digest}
        ours = {"served": self._digest, "ours": self._text_digest}
        logger.error(what, extra={"worker": gate.worker.address, **theirs, **ours})
