"""``diptych key``: make a client's key."""

import sys
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from diptych import settings
from diptych.api_keys import check_tenant, digest, make_key
from diptych.request_class import RequestClass
from diptych.tenant import MAX_LIMIT, Classes, Limits

_Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None


class KeyConfig(BaseModel):
    """Make a key for a tenant: its line for the router's --api-keys file goes to standard output.

    The key itself is shown once, on standard error, and kept nowhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: CliPositionalArg[Annotated[str, AfterValidator(check_tenant)]] = Field(
        description="Whose requests those with the key are."
    )
    requests_per_minute: _Limit = Field(None, description="The tenant's quota of them.")
    tokens_per_minute: _Limit = Field(None, description="The tenant's quota of them.")
    max_concurrent: _Limit = Field(
        None, description="Requests that the tenant may have open at a time."
    )
    default_class: RequestClass | None = Field(
        None, description="How urgent the tenant's requests are that do not say it."
    )
    highest_class: RequestClass | None = Field(
        None, description="The most urgent class that the tenant's requests may have."
    )


def run(args: list[str]) -> int:
    """Make one; the exit code."""
    config = settings.load(KeyConfig, args, prog="diptych key", env_prefix="DIPTYCH_KEY_")
    key = make_key()
    print(f"the key, shown only now: {key}", file=sys.stderr)  # noqa: T201
    told = config.model_dump(include={*Limits._fields, *Classes._fields}, exclude_none=True)
    limits = "".join(f" {name}={value}" for name, value in told.items())
    print(f"{config.tenant} {digest(key)}{limits}")  # noqa: T201
    return 0
