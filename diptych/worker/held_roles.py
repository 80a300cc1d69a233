"""Which roles a worker has of those that it could have: decided here alone. Pure.

A role that is lost takes nothing new from that moment on. What it had runs on, whichever roles
there are meanwhile: nothing here knows of it.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from diptych.errors import InvalidRequestError, WorkerDrainingError
from diptych.v1.worker_pb2 import WorkerRole
from diptych.wire_names import ROLE_NAMES


class RoleChange(NamedTuple):
    """What a worker had, and what it has from now on; by number."""

    before: tuple[WorkerRole, ...]
    now: tuple[WorkerRole, ...]


class HeldRoles:
    """Invariant: at least one role is held, and none that the process does not serve."""

    def __init__(self, able: Collection[WorkerRole], held: Iterable[WorkerRole]) -> None:
        """``able``: those whose services the process has; ``held``: the first ones, of these."""
        self.able = tuple(sorted(able))
        self.held: tuple[WorkerRole, ...] = tuple(sorted(held))
        assert self.held, "a worker has a role"
        assert set(self.held) <= set(self.able), "of those that it serves"

    def change(self, wanted: Collection[int]) -> RoleChange:
        """Have exactly ``wanted`` from now on.

        Raises InvalidRequestError: none, one twice, one without a name here, or one that this
        process does not serve. Nothing is changed then.
        """
        if not wanted:
            raise InvalidRequestError("names none: a worker has at least one", field="roles")
        if len(set(wanted)) < len(wanted):
            raise InvalidRequestError("names one twice", field="roles")
        for role in wanted:
            if role not in ROLE_NAMES:
                raise InvalidRequestError(f"{role} is no role", field="roles")
            if role not in self.able:
                served = ", ".join(ROLE_NAMES[each] for each in self.able)
                raise InvalidRequestError(
                    f"this process serves {served} alone, not {ROLE_NAMES[role]}: a worker that "
                    "was started as diptych worker serves both",
                    field="roles",
                )
        before = self.held
        self.held = tuple(role for role in self.able if role in wanted)
        return RoleChange(before, self.held)

    def check(self, role: WorkerRole) -> None:
        """Raises WorkerDrainingError: new work of that role is for others."""
        if role not in self.held:
            raise WorkerDrainingError(f"the worker has not the role {ROLE_NAMES[role]} now")
