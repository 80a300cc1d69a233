"""A JSON file of a model's folder."""

import json
from pathlib import Path
from typing import Any

from diptych.errors import ConfigurationError


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object that is written there; missing_ok: empty where there is no such file.

    Raises ConfigurationError, which names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ConfigurationError(f"{path}: there is no such file") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: nested too deep") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: {path.name} is not a JSON object")
    return content
