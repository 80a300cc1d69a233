"""What a transport and its agents raise. Light imports: an agent's process knows them too."""


class TransportError(Exception):
    """A read or a connection failed for good; the message says how."""

    broke_agent = False  # the read had begun: our end of the transport ended for it to be over


class SourceLostError(TransportError):
    """The process that was read from is gone."""


class AgentLostError(TransportError):
    """Our own end of the transport is gone, and its reads with it; it is being rebuilt."""


class AgentTakenError(TransportError):
    """Our own end of the transport hung or crashed as it was to connect this source.

    All that others read over it ended with it, so it is not simply tried again.
    """


class BrokenReadError(Exception):
    """A read that had begun met an error, which does not end it: it may still write.

    Only the end of its agent ends it. So this is no TransportError; ``error`` says what it
    met, for when the read has ended.
    """

    def __init__(self, error: TransportError) -> None:
        super().__init__(str(error))
        self.error = error


class UndeadAgentError(Exception):
    """An agent inside this process outlives its teardown: its reads may still write.

    Nothing but the end of the process ends them, so that is what has to follow.
    """
