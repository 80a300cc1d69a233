"""The part of Gateway API's GRPCRoute that the chart may use; no package carries its schema whole.

Written after the standard channel's definition of gateway.networking.k8s.io/v1, release 1.4.
"""

from tests.unit.deploy.values_schema import COUNT, PORT, SOME_TEXT, TEXT, Json, closed

_HOST: Json = {
    "type": "string",
    "minLength": 1,
    "maxLength": 253,
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_REFERENCE: dict[str, Json] = {
    "group": TEXT,
    "kind": SOME_TEXT,
    "namespace": SOME_TEXT,
    "name": SOME_TEXT,
    "port": PORT,
}


def _some(items: Json, at_most: int) -> Json:
    return {"type": "array", "maxItems": at_most, "items": items}


GRPC_ROUTE = closed(
    {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": "GRPCRoute"},
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "parentRefs": _some(closed({**_REFERENCE, "sectionName": TEXT}, ("name",)), 32),
                "hostnames": _some(_HOST, 16),
                "rules": _some(
                    closed(
                        {
                            "name": SOME_TEXT,
                            "backendRefs": _some(
                                closed({**_REFERENCE, "weight": COUNT}, ("name",)), 16
                            ),
                        }
                    ),
                    16,
                ),
            }
        ),
    },
    ("apiVersion", "kind", "metadata", "spec"),
)
