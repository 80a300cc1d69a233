"""How tokens are drawn: every sampling parameter, declared once. Pure.

A field of :class:`SamplingOptions` declares what a client may say: name, type, range,
default, help text, and whether the model's makers may recommend a value. From there
come the checks of router and workers, the mapping to both proto messages
(``SamplingOptions`` for clients, ``SamplingParams`` for workers), the Python client's
options and the flags of ``diptych generate``. :class:`SamplingParams` is the part that
a worker gets, with nothing left open.

To add a parameter: a field here (in both classes if workers need it), one in each
proto message, and the sampler's code. Tests compare all of them, and follow each value
from the client's options to the workers' parameters.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from diptych.constraint import MAX_CONSTRAINT_CHARACTERS, Constraint, OutputGrammar
from diptych.errors import InvalidRequestError
from diptych.v1 import common_pb2, inference_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_CHOICES = 16
MAX_BAD_WORD_CHARACTERS = 128

_UINT32 = 2**32 - 1
_UINT64 = 2**64 - 1
_FLOAT32: Final = struct.Struct("<f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What the declaration of an option says beside its name and type.

    ``default`` applies where neither the client nor the model's makers say anything;
    None where something else decides (the router draws the seed). Numbers lie within
    ``low`` and ``high``, those of a map too; of lists and maps ``max_items`` bounds the
    length, of each string in them ``max_characters``.
    """

    help: str
    default: float | None = None
    low: float = 0
    high: float = math.inf
    is_low_excluded: bool = False
    max_items: int = 0
    max_characters: int = 0
    from_model: bool = False  # generation_config.json may set it
    is_flag: bool = True  # ``diptych generate`` has it


def _option(help_text: str, unset: object = None, **declared: Any) -> Any:
    """Declare a field: ``unset`` is its value when the client says nothing."""
    return field(default=unset, metadata={"option": Option(help=help_text, **declared)})


def _map_option(help_text: str, **declared: Any) -> Any:
    """Declare a field with a number for each key; the client says nothing with an empty one."""
    return field(default_factory=dict, metadata={"option": Option(help=help_text, **declared)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How a client wants its tokens drawn. None: as the model's makers recommend, or default."""

    temperature: float | None = _option(
        "0 is greedy.", default=1.0, low=0, high=100, from_model=True
    )
    top_k: int | None = _option(
        "Draw from the k most likely tokens; 0: from all.", default=0, high=_UINT32, from_model=True
    )
    top_p: float | None = _option(
        "Draw from the likeliest tokens up to this probability.",
        default=1.0,
        high=1,
        is_low_excluded=True,
        from_model=True,
    )
    min_p: float | None = _option(
        "Draw from tokens at least this likely beside the likeliest; 0: from all.",
        default=0.0,
        high=1,
        from_model=True,
    )
    presence_penalty: float | None = _option(
        "What to take from the logit of each token that the output has.",
        default=0.0,
        low=-2,
        high=2,
    )
    frequency_penalty: float | None = _option(
        "What to take from the logit of a token as often as the output has it.",
        default=0.0,
        low=-2,
        high=2,
    )
    repetition_penalty: float | None = _option(
        "Divides the logit of each token that prompt or output has; a negative one is multiplied.",
        default=1.0,
        low=0.01,
        high=100,
        from_model=True,
    )
    logit_bias: Mapping[int, float] = _map_option(
        "What to add to the logit of a token id.",
        low=-100,
        high=100,
        max_items=MAX_BIASED_TOKEN_IDS,
    )
    logprobs: int | None = _option(
        "Report log probabilities: of each token and of so many likeliest ones.",
        high=MAX_LOGPROBS,
        is_flag=False,
    )
    prompt_logprobs: int | None = _option(
        "Report the same of the prompt's tokens but the first.", high=MAX_LOGPROBS, is_flag=False
    )
    n: int | None = _option(
        "Choices to make from one prompt.", default=1, low=1, high=MAX_CHOICES, is_flag=False
    )
    best_of: int | None = _option(
        "Choices to draw, of which the n likeliest by mean log probability are given; unset: n.",
        low=1,
        high=MAX_CHOICES,
        is_flag=False,
    )
    seed: int | None = _option(
        "The same seed gives the same answer; unset: a new one.", high=_UINT64
    )
    max_tokens: int | None = _option(
        "Output tokens at the most; unset: what the context length leaves.", low=1, high=_UINT32
    )
    min_tokens: int = _option("Output tokens before which nothing ends it.", 0, high=_UINT32)
    stop: tuple[str, ...] = _option(
        "Text that ends the answer.",
        (),
        max_items=MAX_STOP_STRINGS,
        max_characters=MAX_STOP_CHARACTERS,
    )
    stop_token_ids: tuple[int, ...] = _option(
        "Token id that ends the answer.", (), high=_UINT32, max_items=MAX_STOP_TOKEN_IDS
    )
    include_stop_str_in_output: bool = _option(
        "End the text with the stop string or token that ended the answer.", False
    )
    bad_words: tuple[str, ...] = _option(
        "Word that the answer may not have.",
        (),
        max_items=MAX_BAD_WORDS,
        max_characters=MAX_BAD_WORD_CHARACTERS,
    )
    constraint: Constraint | None = field(
        default=None,
        metadata={
            "option": Option(
                help="What the output has to be.",
                max_characters=MAX_CONSTRAINT_CHARACTERS,
                is_flag=False,
            )
        },
    )
    ignore_eos: bool = _option("Go on after the model's end-of-sequence token.", False)
    return_margins: bool = _option(
        "Report how far each token was from being another one.", False, is_flag=False
    )

    @property
    def num_choices(self) -> int:
        """How many answers are wanted."""
        return 1 if self.n is None else self.n

    @property
    def num_drawn(self) -> int:
        """How many are made for that."""
        return self.num_choices if self.best_of is None else self.best_of


NOTHING_SAID: Final = SamplingOptions()
"""Everything as the model's makers recommend, or by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a worker draws tokens; fully resolved (no unset values)."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0  # 64 bits
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's own among them
    bad_words: frozenset[tuple[int, ...]] = frozenset()  # tokens that may not come in a row
    constraint: OutputGrammar | None = None
    return_margins: bool = False
    logprobs: int | None = None  # of how many likeliest tokens; None: not even of the drawn one

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far change how the next one is drawn."""
        return bool(
            self.presence_penalty
            or self.constraint is not None
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or any(len(word) > 1 for word in self.bad_words)
        )

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> "SamplingParams":
        """Read a resolved message (the router validated it)."""
        given = {item.name: value for item, value in message.ListFields()}
        given["stop_token_ids"] = frozenset(message.stop_token_ids)
        given["logit_bias"] = dict(message.logit_bias)
        given["bad_words"] = frozenset(tuple(word.token_ids) for word in message.bad_words)
        if message.HasField("constraint"):
            given["constraint"] = OutputGrammar.from_proto(message.constraint)
        return cls(**given)

    def to_proto(self) -> common_pb2.SamplingParams:
        """As it goes to the workers; every value is set."""
        values = {name: getattr(self, name) for name in WORKER_NAMES}
        values["stop_token_ids"] = sorted(self.stop_token_ids)
        words = sorted(self.bad_words)
        values["bad_words"] = [common_pb2.TokenSequence(token_ids=word) for word in words]
        if self.constraint is not None:
            values["constraint"] = self.constraint.to_proto()
        return common_pb2.SamplingParams(**values)


OPTIONS: Final[Mapping[str, Option]] = {
    item.name: item.metadata["option"] for item in fields(SamplingOptions)
}
"""Every declaration, by the parameter's name."""

WORKER_NAMES: Final = tuple(item.name for item in fields(SamplingParams))
"""The parameters that workers know."""


def options_from_proto(message: inference_pb2.SamplingOptions, path: str) -> SamplingOptions:
    """Read what a client sent; lists are checked for their length before they are copied.

    Raises:
        InvalidRequestError: a list is too long; the field is ``path`` and the option's name.
    """
    given: dict[str, Any] = {}
    for item, value in message.ListFields():
        name, option = item.name, OPTIONS[item.name]
        if name == "constraint":
            given[name] = Constraint.from_proto(value, f"{path}.{name}")
        elif option.max_items:
            _check_length(name, len(value), option, path)
            given[name] = dict(value) if isinstance(value, Mapping) else tuple(value)
        else:
            given[name] = value
    return SamplingOptions(**given)


def options_to_proto(options: SamplingOptions) -> inference_pb2.SamplingOptions:
    """What a client sends; what is None stays unset."""
    values = {name: getattr(options, name) for name in OPTIONS}
    if options.constraint is not None:
        values["constraint"] = options.constraint.to_proto()
    return inference_pb2.SamplingOptions(**values)


def check_options(options: SamplingOptions | SamplingParams, path: str) -> None:
    """Check every value that is given against its declaration; a default is within it.

    Raises InvalidRequestError with the field ``path`` and the option's name.
    """
    for item in fields(options):
        value = getattr(options, item.name)
        if value is not None and value is not item.default:
            _check(item.name, value, OPTIONS[item.name], path)


def _check(name: str, value: Any, option: Option, path: str) -> None:
    if isinstance(value, tuple):
        _check_length(name, len(value), option, path)
        if option.max_characters:
            _check_strings(name, value, option, path)
        else:
            for index, each in enumerate(value):
                _check(f"{name}[{index}]", each, option, path)
    elif isinstance(value, Constraint):
        value.check(f"{path}.{name}")
    elif isinstance(value, Mapping):
        _check_length(name, len(value), option, path)
        for key, number in value.items():
            if not 0 <= key <= _UINT32:
                raise InvalidRequestError(f"{key} is no token id", field=f"{path}.{name}")
            _check(f"{name}[{key}]", number, option, path)
    elif isinstance(value, int | float) and not _is_within(value, option):
        low = f"above {option.low:g}" if option.is_low_excluded else f"at least {option.low:g}"
        high = "" if option.high > _UINT32 else f" and at most {option.high:.15g}"
        raise InvalidRequestError(f"must be {low}{high}, is {value}", field=f"{path}.{name}")


def _is_within(value: float, option: Option) -> bool:
    """False for NaN too. By what workers are sent, so that they say no other."""
    low, high = option.low, option.high
    if isinstance(value, float):
        value, low, high = (_as_sent(each) for each in (value, low, high))
    is_above = value > low if option.is_low_excluded else value >= low
    return is_above and value <= high


def _as_sent(value: float) -> float:
    """In 32 bits."""
    try:
        (sent,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(sent)


def _check_length(name: str, length: int, option: Option, path: str) -> None:
    if length > option.max_items:
        raise InvalidRequestError(
            f"has {length} items, more than {option.max_items}", field=f"{path}.{name}"
        )


def _check_strings(name: str, values: tuple[str, ...], option: Option, path: str) -> None:
    for index, value in enumerate(values):
        if not 1 <= len(value) <= option.max_characters:
            raise InvalidRequestError(
                f"must have 1 to {option.max_characters} characters, has {len(value)}",
                field=f"{path}.{name}[{index}]",
            )
