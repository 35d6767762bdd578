"""Errors for bad input. A message says what failed, what was seen and what to do."""


class SigcamError(Exception):
    """Base class of every error that sigcam raises on purpose."""


class AttachError(SigcamError):
    """The network cannot be split into features and head."""


class DataError(SigcamError):
    """Images, labels, classes or maps cannot be used as given."""


class ConfigError(DataError):
    """A setting is unknown, out of range or does not go with another. A DataError, as it was before 0.2."""


class ModelError(SigcamError):
    """A classifier cannot be loaded, or its numbers cannot be used."""


class CheckpointError(SigcamError):
    """A branch file cannot be read, or does not fit the network."""


class MissingExtra(ModelError, DataError):
    """An optional dependency is not installed. Both a ModelError and a DataError, as it was before 0.2."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}: pip install 'sigcam[{extra}]'.")
