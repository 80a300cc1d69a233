"""Where a command's routers are, and how it is let in."""

import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from diptych.address import check_address
from diptych.cli.shown_line import shown
from diptych.client import DEFAULT_RETRIES, DiptychClient
from diptych.client.client import OnRetry
from diptych.errors import ConfigurationError, DiptychError, ModelNotFoundError
from diptych.v1 import inference_pb2


def read_key(path: Path | None) -> str:
    """The key in the file of --api-key-file; empty: there is no file.

    Raises ConfigurationError, which says nothing of what is in it.
    """
    if path is None:
        return ""
    try:
        key = path.read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigurationError(f"--api-key-file: {path}: {why}") from None
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigurationError(f"--api-key-file: {path}: expected one key, a line of ASCII")
    return key


def say_retry(error: DiptychError, pause_s: float) -> None:
    """Why there is no answer yet, and when it is asked again, in a line on standard error."""
    why = shown(f"{error.reason}: {error.message}")
    line = f"diptych: {why}; asking again in {pause_s:.1f} s"
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _check_addresses(text: str) -> str:
    for name in text.split(","):
        if "//" not in name:  # of URLs the client says it, without the secrets in them
            check_address(name.strip())
    return text


class RouterConnection(BaseModel):
    """Settings of every command that asks a router."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: Annotated[str, AfterValidator(_check_addresses)] = Field(
        "127.0.0.1:50051", description="host:port of the router, or of several, with commas."
    )
    retries: int = Field(
        DEFAULT_RETRIES,
        ge=0,
        description="Tries in a row that bring nothing new, before an answer that broke off, "
        "or was refused for the moment, is given up.",
    )
    api_key_file: Path | None = Field(
        None, description="File with the key that the router asks for, and nothing else."
    )
    tls: bool = Field(False, description="Speak TLS; the system's authorities are believed.")
    ca: Path | None = Field(
        None, description="Speak TLS; the authorities of this PEM file are believed."
    )
    server_name: str = Field(
        "",
        description="Name that the router's certificate has to have, where it is reached by "
        "another, as through a forwarded port. Unset: the host of --address.",
    )

    def client(self, on_retry: OnRetry | None = None) -> DiptychClient:
        """``on_retry`` as DiptychClient's. Raises ConfigurationError: a file cannot be read."""
        return DiptychClient(
            self.address,
            api_key=read_key(self.api_key_file),
            tls=self.ca or self.tls,
            server_name=self.server_name,
            retries=self.retries,
            on_retry=on_retry,
        )


class Connection(RouterConnection):
    """And of those that ask for answers."""

    model: str = Field("", description="Name of the model; unset: the router's only one.")
    timeout_s: float | None = Field(None, gt=0, description="Give an answer up after this, s.")

    async def find_model(self, client: DiptychClient) -> inference_pb2.Model:
        """The model that is to answer. Raises DiptychError."""
        served = await client.models()
        for model in served:
            if self.model in ("", model.name):
                return model
        names = ", ".join(model.name for model in served)
        raise ModelNotFoundError(f"no model {self.model!r}; there is {names}")
