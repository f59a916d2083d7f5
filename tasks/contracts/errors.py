"""The errors flowmill raises: each says where, what came, what was expected and what to do.

They carry one string only, so they stay picklable when they cross a process or a Flyte task boundary.
"""


class FlowmillError(Exception):
    """Base of every error raised on purpose; anything else that escapes is a bug."""


class ConfigError(FlowmillError, ValueError):
    """A recipe or an override that cannot work. Never retried."""


class PluginNotFoundError(ConfigError):
    """No plugin of that name on that axis."""


class ContractError(FlowmillError, ValueError):
    """A batch, reference or sampling contract that breaks its own rules."""


class StoreError(FlowmillError):
    """The artifact store is unreachable, misconfigured, full, or holds corrupt data."""


class StoreUnavailableError(StoreError):
    """The store did not answer, or said that it is busy, for longer than was waited; it may work again later."""


class ArtifactGoneError(StoreError):
    """An artifact is known by its manifest, but its data has expired or was deleted."""


class RewardError(FlowmillError):
    """A reward raised or returned a value that is not finite; names the sample."""


class NumericsError(FlowmillError):
    """Training produced values that cannot be continued from."""


class CheckpointError(FlowmillError):
    """A model checkpoint cannot be read or does not fit the model."""


class MemoryLimitError(FlowmillError):
    """Memory ran out, and a smaller micro-batch would not help or would change the results."""


class CacheFolderError(FlowmillError):
    """A folder that the environment names for a library's cache cannot be written to."""
