"""The model that a router answers for: what of it is needed without a worker."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.errors import ConfigurationError
from diptych.json_file import read_object
from diptych.models.recommended import read_recommended
from diptych.sampling_params import NOTHING_SAID, SamplingOptions
from diptych.text.response.families import AnswerForm, family, family_of
from diptych.text.response.template import ResponseTemplate
from diptych.text.tokenizer import Tokenizer
from router.generation.prompt_work import Pooling

_POOLINGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST_TOKEN,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Immutable. ``recommended`` applies where a client leaves an option unset."""

    name: str
    tokenizer: Tokenizer
    recommended: SamplingOptions = NOTHING_SAID
    response_template: ResponseTemplate | None = None
    """How its answers say reasoning and calls of tools; None: nobody knows."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that mark these, so that their text counts."""
    pooling: Pooling | None = None
    """How its makers make vectors with it; None: they do not say that it is for that."""
    vector_size: int | None = None
    """Of its vectors; None: its config does not say."""

    @classmethod
    def from_folder(
        cls,
        name: str,
        folder: Path,
        answer_form: AnswerForm = AnswerForm.AUTO,
        *,
        inert_contents: bool = False,
    ) -> "ServedModel":
        """Read a model folder. Blocking. ``inert_contents`` is as of a Tokenizer.

        Logs what the model's makers recommend, for it changes answers.

        Raises:
            ConfigurationError: a file is missing or wrong.
        """
        tokenizer = Tokenizer.from_folder(folder, inert_contents=inert_contents)
        template = _response_template(tokenizer, answer_form)
        options, ignored = read_recommended(folder)
        said = {key: value for key, value in asdict(options).items() if value}
        if said or ignored:
            logger.info(
                "sampling defaults come from the model",
                extra={"model": name, "defaults": said, "not_served": ignored},
            )
        return cls(
            name=name,
            tokenizer=tokenizer,
            recommended=options,
            response_template=template,
            shown_ids=tokenizer.special_ids_in(template.marks) if template else frozenset(),
            pooling=_read_pooling(folder),
            vector_size=_read_vector_size(folder),
        )


def _response_template(tokenizer: Tokenizer, form: AnswerForm) -> ResponseTemplate | None:
    """What its makers declare, else what its chat template looks like."""
    if form is AnswerForm.NONE:
        return None
    if form is not AnswerForm.AUTO:
        return family(form.value)
    if tokenizer.declared_response is not None:
        return ResponseTemplate.read(tokenizer.declared_response)
    chat = tokenizer.chat_template
    return None if chat is None else family_of(chat.source)


def _read_vector_size(folder: Path) -> int | None:
    """The width of its hidden states. The tokenizer has read the same file."""
    content = read_object(folder / "config.json")
    width = {**content, **(content.get("text_config") or {})}.get("hidden_size")
    return width if isinstance(width, int) else None


def _read_pooling(folder: Path) -> Pooling | None:
    """What sentence-transformers' file says. Raises ConfigurationError."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    content = read_object(path)
    asked = {pooling for name, pooling in _POOLINGS.items() if content.get(name)}
    if len(asked) != 1:
        raise ConfigurationError(f"{path}: none, or several, of {', '.join(_POOLINGS)}")
    return asked.pop()
