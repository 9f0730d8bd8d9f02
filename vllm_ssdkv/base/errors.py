"""Every error this package raises on purpose. All derive from :class:`SSDKVError`."""

from __future__ import annotations


class SSDKVError(Exception):
    """Base of all errors of this package; its text says what is wrong and the way out."""


class ConfigError(SSDKVError):
    """An option is unknown, of the wrong type, or contradicts another option or the model.

    No ValueError: pydantic, which vLLM's configuration is made with, would wrap its text.
    """


class DramTooSmallError(ConfigError):
    """DRAM given to a worker cannot hold what it needs; ``needed`` bytes can."""

    def __init__(self, text: str, needed: int):
        super().__init__(text)
        self.needed = needed


class UnsupportedError(SSDKVError):
    """This model or engine setting cannot be served in the chosen mode."""


class StepError(SSDKVError):
    """vLLM computes tokens of requests, and has told the connector of no step with them."""


class StoreError(SSDKVError):
    """Base of everything that can go wrong with the store on disk."""


class StoreLockedError(StoreError):
    """Another process holds the store's directory."""


class FingerprintMismatchError(StoreError):
    """The directory holds KV of another model, dtype, layout or parallel size."""


class KeyMismatchError(StoreError):
    """The store is encrypted with another key, or not encrypted where it should be, or reverse."""


class FormatError(StoreError):
    """Bytes on disk are not a header, superblock or journal that this version reads."""


class DamagedError(FormatError):
    """Bytes on disk were ours and are not what we wrote; the text names the file."""


class WithdrawnError(SSDKVError):
    """Work was taken back from the device that had begun it; nobody is told."""


class StoreFullError(StoreError):
    """No slot is free and none may be evicted."""


class StoreFailedError(StoreError):
    """No device is left that could serve the request; the text names the devices."""


class DeviceError(StoreError):
    """A device cannot be opened, sized or locked; the text names its path."""


class EngineUnavailableError(StoreError):
    """The named I/O engine cannot run here; the text says why."""


class DeadlineError(StoreError):
    """An I/O did not end before its deadline; the text names the devices it waited for."""


class BenchError(SSDKVError):
    """A benchmark cannot run here, or what it measured moved wrong bytes; the text says which."""


class BatchError(SSDKVError):
    """A batch cannot run: its input, its output file or the model is not fit for it."""


class FpgaError(SSDKVError):
    """An FPGA device or its simulation failed, or is closed; the text names it."""


class WrongPagesError(SSDKVError):
    """Pages that a device read itself are not what the store wrote; they are read again."""


class FpgaListError(FpgaError):
    """A list of jobs or pages for an FPGA kernel is broken; the text names the entry."""


class FpgaLimitError(FpgaError):
    """Work for an FPGA kernel is longer than it can take; the text names the limit."""


class FpgaDeadlineError(FpgaError):
    """An FPGA device did not answer in time; the text names the deadline."""


class FpgaMemoryError(FpgaError):
    """Memory answered an FPGA kernel with an error; the text names the argument that lies there."""


class FpgaVersionError(FpgaError):
    """Kernels are of another version than this package's; the text names both."""


class SharedFileError(SSDKVError):
    """A file that a node and its host share is open on the other side; the text names it."""


class PoolError(SSDKVError):
    """A pool of nodes cannot be read, started or stopped; the text names the node."""


class NodeError(SSDKVError):
    """Base of everything that can go wrong between an engine and a node."""


class NodeGoneError(NodeError):
    """The other side ended the connection, or was silent until the deadline."""


class NodeRefusedError(NodeError):
    """The other side refused this connection or a frame of it; the text has its reason."""


class NodeFailedError(NodeError):
    """A node that attends to contexts is out of reach; ``node`` is its number."""

    def __init__(self, node: int, text: str):
        super().__init__(text)
        self.node = node


class ProtocolError(NodeError):
    """A frame is malformed, too large, out of order or of another version.

    ``cause`` is one word, for the count of refused frames.
    """

    def __init__(self, cause: str, text: str):
        super().__init__(text)
        self.cause = cause


class CredentialsError(NodeError):
    """Keys of a node are missing, unreadable or expired; the text names the file."""
