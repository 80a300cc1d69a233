"""The switch that lets tests break a worker's transfers, and its control service."""

import logging

import grpc

from diptych.errors import ConfigurationError, InvalidRequestError
from diptych.rpc.server import Context
from diptych.telemetry.metrics import Metrics
from diptych.v1 import faults_pb2, faults_pb2_grpc
from kvtransfer.config import TransferConfig
from kvtransfer.memory import HostMemory
from kvtransfer.testing.canaries import Canaries, FreeBlocks
from kvtransfer.testing.faults import FaultScript, parse_rules
from kvtransfer.testing.transport import FaultSwitch

logger = logging.getLogger(__name__)


class FaultsServicer(faults_pb2_grpc.FaultsServicer):
    """Drives one worker's faults. Event loop only; ``attach`` once the pool exists."""

    def __init__(self, switch: FaultSwitch) -> None:
        self.switch = switch
        self.canaries: Canaries | None = None

    def attach(self, memory: HostMemory, pool: FreeBlocks) -> Canaries:
        """The pool exists. The caller runs ``canaries.run()``."""
        self.switch.memory = memory
        self.switch.generation_of = pool.generation
        self.canaries = Canaries(pool, memory)
        return self.canaries

    async def SetRules(
        self, request: faults_pb2.SetRulesRequest, context: Context
    ) -> faults_pb2.FaultsReport:
        """Replace the script; what the old one began goes on."""
        self.switch.script.set_rules(parse_rules(request.rules))
        return self._report()

    async def Report(
        self, request: faults_pb2.ReportRequest, context: Context
    ) -> faults_pb2.FaultsReport:
        """What happened so far."""
        return self._report()

    def _report(self) -> faults_pb2.FaultsReport:
        switch, canaries = self.switch, self.canaries
        report = faults_pb2.FaultsReport(
            num_fired=switch.script.num_fired,
            num_reads_unfinished=len(switch.unfinished),
            num_foreign_writes=switch.num_foreign_writes,
        )
        if canaries is not None:
            canaries.look()
            report.num_canaries = canaries.num_painted
            report.num_canaries_checked = canaries.num_checked
            report.num_canaries_changed = canaries.num_changed
        return report


def serve_faults(
    config: TransferConfig, server: grpc.aio.Server, metrics: Metrics
) -> FaultsServicer | None:
    """Register the control service, loudly, if faults are allowed; None otherwise.

    Raises ConfigurationError: ``config.faults`` are no rules.
    """
    if not config.allow_faults:
        return None
    try:
        rules = parse_rules(config.faults)
    except InvalidRequestError as error:
        raise ConfigurationError(f"transfer.faults: {error.message}") from None
    logger.critical("FAULTS MAY BE INJECTED into this worker's transfers: it is for tests only")
    metrics.read_gauge(
        "faults_allowed", "1: faults may be injected into transfers. For tests only.", lambda: 1
    )
    servicer = FaultsServicer(FaultSwitch(FaultScript(rules)))
    faults_pb2_grpc.add_FaultsServicer_to_server(servicer, server)
    return servicer
