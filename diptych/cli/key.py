"""``diptych key``: make a client's key."""

import sys
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.api_keys import check_tenant, digest, make_key


class KeyConfig(BaseModel):
    """Make a key for a tenant: its line for the router's --api-keys file goes to standard output.

    The key itself is shown once, on standard error, and kept nowhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: CliPositionalArg[Annotated[str, AfterValidator(check_tenant)]] = Field(
        description="Whose requests those with the key are."
    )


def run(args: list[str]) -> int:
    """Make one; the exit code."""
    config = settings.load(KeyConfig, args, prog="diptych key", env_prefix="DIPTYCH_KEY_")
    key = make_key()
    print(f"the key, shown only now: {key}", file=sys.stderr)  # noqa: T201
    print(f"{config.tenant} {digest(key)}")  # noqa: T201
    return 0
