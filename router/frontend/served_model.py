"""The model that a router answers for: what of it is needed without a worker."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.models.recommended import read_recommended
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Immutable. ``recommended`` applies where a client leaves an option unset."""

    name: str
    tokenizer: Tokenizer
    recommended: SamplingOptions = NOTHING_SAID

    @classmethod
    def from_folder(cls, name: str, folder: Path) -> "ServedModel":
        """Read a model folder. Blocking.

        Logs what the model's makers recommend, for it changes answers.

        Raises:
            ConfigurationError: a file is missing or wrong.
        """
        tokenizer = Tokenizer.from_folder(folder)
        options, ignored = read_recommended(folder)
        said = {key: value for key, value in asdict(options).items() if value}
        if said or ignored:
            logger.info(
                "sampling defaults come from the model",
                extra={"model": name, "defaults": said, "not_served": ignored},
            )
        return cls(name=name, tokenizer=tokenizer, recommended=options)
