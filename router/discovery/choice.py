"""Which source a router asks for its workers."""

from diptych.errors import ConfigurationError
from router.config import RouterConfig
from router.discovery.file import FileDiscovery
from router.discovery.source import Clock, Discovery, StaticDiscovery
from router.discovery_settings import DnsSource, KubernetesSource


def choose(config: RouterConfig, clock: Clock) -> Discovery:
    """The source that the settings name. Raises ConfigurationError."""
    match config.discovery:
        case "static":
            return StaticDiscovery(prefill=config.prefill, decode=config.decode)
        case "file":
            assert config.file.path is not None, "the settings were checked"
            return FileDiscovery(config.file.path, interval_s=config.file.interval_s, clock=clock)
        case "dns":
            return _dns(config.dns, clock)
        case "kubernetes":
            return _kubernetes(config.kubernetes, clock)


def _dns(source: DnsSource, clock: Clock) -> Discovery:
    """Its resolver brings an HTTP client of its own, so it is imported where it is wanted."""
    from router.discovery.dns import DnsDiscovery, DnsLookup

    return DnsDiscovery(source, lookup=DnsLookup(source.server), clock=clock)


def _kubernetes(source: KubernetesSource, clock: Clock) -> Discovery:
    """Its client is an extra, so it is imported where it is wanted."""
    try:
        from router.discovery.kubernetes import KubernetesApi, KubernetesDiscovery
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--discovery: kubernetes needs the extra of that name: {error.name} is not installed"
        ) from None
    return KubernetesDiscovery(source, api=KubernetesApi(source), clock=clock)
