"""Errors. A message says what failed, what was found and what to do."""

from collections.abc import Iterator


class SigcamError(Exception):
    """Base class of all errors that sigcam raises on purpose."""


class AttachError(SigcamError):
    """The network cannot be split into features and head."""


class ExampleNeeded(AttachError):
    """The network takes none of the inputs that are tried by default."""


class NoLogits(AttachError):
    """The network does not return logits (B, C), or no layer with parameters makes them."""


class DataError(SigcamError):
    """Images, labels, classes or maps cannot be used as given."""


class ConfigError(DataError):
    """A setting is unknown, out of range or conflicts with another. A DataError for compatibility."""


class ModelError(SigcamError):
    """A classifier cannot be loaded, or its outputs cannot be used."""


class CheckpointError(SigcamError):
    """A branch file cannot be read, or does not fit the network."""


class MissingExtra(ModelError, DataError):
    """An optional dependency is not installed. A ModelError and a DataError for compatibility."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}: pip install 'sigcam[{extra}]'.")


class DiskFull(SigcamError, OSError):
    """A file could not be written for lack of space. An OSError for compatibility."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, what it was raised from or while handling, and so on."""
    seen = set[int]()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
