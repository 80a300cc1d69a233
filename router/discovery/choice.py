"""Which source a router asks for its workers."""

from router.config import RouterConfig
from router.discovery.dns import DnsDiscovery, DnsLookup
from router.discovery.file import FileDiscovery
from router.discovery.source import Clock, Discovery, StaticDiscovery


def choose(config: RouterConfig, clock: Clock) -> Discovery:
    """The source that the settings name. Raises ConfigurationError."""
    match config.discovery:
        case "static":
            return StaticDiscovery(prefill=config.prefill, decode=config.decode)
        case "file":
            assert config.file.path is not None, "the settings were checked"
            return FileDiscovery(config.file.path, interval_s=config.file.interval_s, clock=clock)
        case "dns":
            return DnsDiscovery(config.dns, lookup=DnsLookup(config.dns.server), clock=clock)
