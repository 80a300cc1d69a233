"""Workers from Kubernetes: the EndpointSlices of headless services, listed and then watched.

After any error, and each ``relist_s`` whatever was heard, all are listed anew: an event that was
missed, or a watch that fell silent, is made good for then at the latest.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from lightkube import AsyncClient, ConfigError, KubeConfig
from lightkube.core.client import LabelSelector
from lightkube.models.discovery_v1 import EndpointSlice as SliceModel
from lightkube.resources.discovery_v1 import EndpointSlice

from diptych.address import is_address
from diptych.errors import ConfigurationError
from router.discovery.endpoint_slices import Endpoint, EndpointSet, Slice
from router.discovery.source import Clock, Doubt, Freshness, Targets
from router.discovery.worker_bound import WorkerBound
from router.discovery_settings import KubernetesSource

_SERVICE_LABEL = "kubernetes.io/service-name"
_LIST_S = 15.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 10.0
_LEAST_GAP_S = 1.0  # from one opening of a watch to the next


class Listed(NamedTuple):
    """All slices of the services, as of a version that a watch can go on from."""

    version: str
    slices: tuple[Slice, ...]


class Change(NamedTuple):
    """What a watch says of one slice."""

    slice: Slice
    is_deleted: bool


class SliceApi(Protocol):
    """What is asked of Kubernetes. Either question raises whatever it likes."""

    async def list(self) -> Listed:
        """All that there are."""
        ...

    def watch(self, version: str) -> AsyncGenerator[Change, None]:
        """What changes after that version; may end at any time, or fall silent."""
        ...

    async def close(self) -> None:
        """Ask nothing more."""
        ...


class KubernetesApi:
    """Asks by lightkube, as the pod's service account or as a kubeconfig says.

    A watch that the server ends is opened again from where it was, once a second at the most.
    """

    def __init__(
        self,
        source: KubernetesSource,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Raises ConfigurationError: nothing says where the API is."""
        try:
            path = source.kubeconfig
            config = KubeConfig.from_env() if path is None else KubeConfig.from_file(path)
            self._client = AsyncClient(config=config.get(), namespace=source.namespace)
        except ConfigError as error:
            raise ConfigurationError(f"--kubernetes.kubeconfig: {error}") from None
        except Exception as error:  # noqa: BLE001 - its reader checks little of what it reads
            why = " ".join(repr(error).split())
            raise ConfigurationError(f"--kubernetes.kubeconfig: not a kubeconfig: {why}") from None
        services = sorted({*source.prefill, *source.decode})
        self._labels: LabelSelector = {_SERVICE_LABEL: services}
        self._port = source.port
        self._clock = clock
        self._sleep = sleep
        self._open_at_s = 0.0  # the next watch, at the earliest
        # It opens ended watches again by itself, without a pause, and has no other door.
        self._client._client._client.event_hooks = {"request": [self._pace]}

    async def list(self) -> Listed:
        """See :class:`SliceApi`."""
        found = self._client.list(EndpointSlice, labels=self._labels)
        slices = [_plain(each, self._port) async for each in found]
        return Listed(found.resourceVersion, tuple(slices))

    async def watch(self, version: str) -> AsyncGenerator[Change, None]:
        """See :class:`SliceApi`."""
        events = self._client.watch(EndpointSlice, labels=self._labels, resource_version=version)
        async for kind, each in events:
            yield Change(_plain(each, self._port), kind == "DELETED")

    async def close(self) -> None:
        """See :class:`SliceApi`."""
        await self._client.close()

    async def _pace(self, request: Any) -> None:  # of httpx
        if "watch" in request.url.params:
            await self._sleep(max(0.0, self._open_at_s - self._clock()))
            self._open_at_s = self._clock() + _LEAST_GAP_S


class KubernetesDiscovery:
    """Lists, watches, and lists again."""

    def __init__(
        self,
        source: KubernetesSource,
        *,
        api: SliceApi,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._relist_s = source.relist_s
        self._api = api
        self._clock = clock
        self._sleep = sleep
        self._set = EndpointSet(prefill=source.prefill, decode=source.decode)
        self._bound = WorkerBound(source.max_workers)
        self._freshness = Freshness(clock)
        self._watch: AsyncGenerator[Change, None] | None = None  # after a list
        self._relist_at_s = 0.0
        self._opened_at_s = 0.0  # the watch
        self._list_pause_s = _FIRST_PAUSE_S
        self._watch_pause_s = _FIRST_PAUSE_S  # longer: watches fail, and no list makes good for it
        self._doubt = Doubt("Kubernetes does not say where workers are: those known stay")

    @property
    def age_s(self) -> float:
        """Since a list or an event; see :class:`Discovery`."""
        return self._freshness.age_s

    async def targets(self) -> AsyncIterator[Targets]:
        """See :class:`router.discovery.source.Discovery`."""
        told: Targets | None = None
        is_listed = False
        try:
            while True:
                is_listed |= await self._list() if self._watch is None else await self._hear()
                now = self._bound.of(self._set.targets)
                if is_listed and now != told:
                    told = now
                    yield now
        finally:
            await self._end_watch()
            await self._api.close()

    async def _list(self) -> bool:
        """Learn all anew; False, after a pause, if that failed."""
        try:
            async with asyncio.timeout(_LIST_S):
                listed = await self._api.list()
        except Exception as error:  # noqa: BLE001 - whatever it is, those known stay
            await self._failed(error, self._list_pause_s)
            self._list_pause_s = min(2 * self._list_pause_s, _MAX_PAUSE_S)
            return False
        self._set.listed(listed.slices)
        self._freshness.heard()
        self._list_pause_s = _FIRST_PAUSE_S
        if self._watch_pause_s == _FIRST_PAUSE_S:
            self._doubt.over()
        self._opened_at_s = self._clock()
        self._relist_at_s = self._opened_at_s + self._relist_s
        self._watch = self._api.watch(listed.version)
        return True

    async def _hear(self) -> bool:
        """Learn what changed; without a watch afterwards if it is time to list again."""
        assert self._watch is not None, "only after a list"
        remaining_s = self._relist_at_s - self._clock()
        if remaining_s <= 0:  # events kept coming
            await self._end_watch()
            return True
        try:
            async with asyncio.timeout(remaining_s):
                change = await anext(self._watch, None)
        except TimeoutError:
            await self._end_watch()
            self._watched()
            return True
        except Exception as error:  # noqa: BLE001 - 410, a cut line: all are listed again
            await self._end_watch()
            await self._watch_failed(error)
            return True
        self._watched()
        self._freshness.heard()
        if change is None:
            await self._end_watch()
        elif change.is_deleted:
            self._set.deleted(change.slice.name)
        else:
            self._set.changed(change.slice)
        return True

    def _watched(self) -> None:
        """A watch was heard from, or stood for long."""
        self._watch_pause_s = _FIRST_PAUSE_S
        self._doubt.over()

    async def _watch_failed(self, error: Exception) -> None:
        """Wait; longer each time, where watches are refused although lists are not."""
        if self._clock() - self._opened_at_s >= _MAX_PAUSE_S:
            self._watched()
        await self._failed(error, self._watch_pause_s)
        self._watch_pause_s = min(2 * self._watch_pause_s, _MAX_PAUSE_S)

    async def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.aclose()

    async def _failed(self, error: Exception, pause_s: float) -> None:
        self._doubt.because(" ".join(str(error).split()) or type(error).__name__)
        await self._sleep(pause_s)


def _plain(model: SliceModel, port_name: str) -> Slice:
    """What counts of a slice. Conditions that are not given are as good as true."""
    metadata = model.metadata
    assert metadata is not None, "the server names every object"
    assert metadata.name is not None, "the server names every object"
    ports = {port.name or "": port.port for port in model.ports or ()}
    endpoints: list[Endpoint] = []
    for each in model.endpoints or ():
        conditions = each.conditions
        is_ready = conditions is None or conditions.ready is not False
        is_terminating = conditions is not None and conditions.terminating is True
        endpoints.extend(
            Endpoint(address, is_ready, is_terminating, each.zone or "")
            for address in each.addresses[:1]
        )
    service = (metadata.labels or {}).get(_SERVICE_LABEL, "")
    port = ports.get(port_name, ports.get("") if len(ports) == 1 else None)
    return _checked(Slice(metadata.name, service, port, tuple(endpoints)))


def _checked(known: Slice) -> Slice:
    """The slice itself. Raises ValueError: it is not as its API says, which the client believes."""
    texts = (known.name, known.service, *(each.zone for each in known.endpoints))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a slice's name, service or zone is no text")
    for each in known.endpoints:
        address = f"{each.address}:{1 if known.port is None else known.port}"
        if not (isinstance(each.address, str) and is_address(address)):
            raise ValueError(f"expected an address and a port, found {address[:100]!r}")
    return known
