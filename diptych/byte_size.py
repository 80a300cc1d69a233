"""Sizes in bytes, as settings take them: 40GiB, 1.5GB, Kubernetes' 40Gi, or the bytes alone."""

import re
from typing import Annotated, Final

from pydantic import ByteSize, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

# All of it: pydantic reads "1,5GiB" as one byte, and leaves away what follows a space.
_WHOLE: Final = re.compile(r"\s*[\d_]*\.?\d+\s*[a-z]*\s*", re.IGNORECASE)
# Kubernetes leaves the B away.
_END: Final = re.compile(r"(?<=\d|\s)([KMGTPE]i)\s*$", re.IGNORECASE)


def _read(value: object, read: ValidatorFunctionWrapHandler) -> object:
    if isinstance(value, str) and not _WHOLE.fullmatch(value):
        raise ValueError("expected a size such as 40GiB")
    try:
        return read(_END.sub(r"\1B", value) if isinstance(value, str) else value)
    except ValidationError:
        raise ValueError("expected a size such as 40GiB") from None


SizeInBytes = Annotated[ByteSize, WrapValidator(_read)]
