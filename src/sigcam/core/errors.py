"""What goes wrong at the doors: each message says what failed, what was seen and what to do."""


class SigcamError(Exception):
    """Base of every error that sigcam raises on purpose."""


class AttachError(SigcamError):
    """The network cannot be split into features and head."""


class DataError(SigcamError):
    """Images, labels, classes or maps that cannot be used as given."""


class ModelError(SigcamError):
    """A classifier that cannot be loaded, or whose numbers cannot be used."""


class CheckpointError(SigcamError):
    """A branch file that cannot be read or does not fit the network."""
