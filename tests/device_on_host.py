"""A device's memory for keys and values, where there is no device."""

import torch

from diptych.engine.kv.memory import DeviceKVMemory
from diptych.word_sums import LINE_WORDS, WORD_BYTES, Sums, Words, total
from kvtransfer.host_sums import Numbering, sums_of

_LINE_BYTES = LINE_WORDS * WORD_BYTES


class DeviceOnHost(DeviceKVMemory):
    """Host memory that calls itself a device's, and sums up as one does."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, torch.device("cpu"))

    def synchronise(self) -> None:
        """Everything is done when it returns."""

    def word_sums(self, words: Words) -> list[Sums]:
        content, sums = self.bytes.numpy().data, []
        for index, (begin, count) in enumerate(zip(words.begins, words.counts, strict=True)):
            run = content[begin * WORD_BYTES : (begin + count) * WORD_BYTES]
            if words.lines is None:
                first = 0 if words.numbers is None else int(words.numbers[index])
                sums.append(sums_of(run, Numbering(first, int(count), 0)))
                continue
            own = ((place, line) for place, line in enumerate(words.lines[index]) if line >= 0)
            sums.append(
                total(
                    sums_of(
                        run[line * _LINE_BYTES :][:_LINE_BYTES],
                        Numbering(place * LINE_WORDS, LINE_WORDS, 0),
                    )
                    for place, line in own
                )
            )
        return sums
