"""The error tree.

LeewayError
├── ConfigError      (exit 2)   a wrong key, value or combination; a run that exists; a port in use
├── ProtocolError    (exit 1)   a peer sent what the protocol does not allow; the message is refused, the daemon goes on
├── RefusedError     (exit 2)   replay refused this process at HELLO (other config, other protocol, unknown role)
├── TryAgainError    (exit 75)  the state moved on under us (a refused commit, a fenced epoch): start again and recover
├── StoreError       (exit 1)   the store cannot be trusted or written: stop, recover from what was acknowledged
├── WeightsError     (exit 1)   a version's files do not match their manifest or notice
├── EngineError      (exit 1)   the engine answered anything but a clean success; `suspect` says whether its weights are in doubt
└── RunError         (exit 1)   the run cannot go on (too many skips, too many failures), with the reason
"""


class LeewayError(Exception):
    """Root of all errors a user may see as one line."""

    exit_code = 1


class ConfigError(LeewayError):
    exit_code = 2


class ProtocolError(LeewayError):
    """`seq` is the number of the request that was not understood, where it could be read."""

    def __init__(self, message: str, *, seq: int | None = None) -> None:
        super().__init__(message)
        self.seq = seq


class RefusedError(LeewayError):
    exit_code = 2


class TryAgainError(LeewayError):
    exit_code = 75


class StoreError(LeewayError):
    pass


class WeightsError(LeewayError):
    pass


class EngineError(LeewayError):
    def __init__(self, message: str, *, suspect: bool = False) -> None:
        super().__init__(message)
        self.suspect = suspect


class RunError(LeewayError):
    pass
