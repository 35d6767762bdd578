"""Files to samples: annotated images, the data set readers, and the loader."""

from sigcam.data.registry import READERS, Reader, list_readers, open_dataset
from sigcam.data.sample import Sample, Samples

__all__ = ["READERS", "Reader", "Sample", "Samples", "list_readers", "open_dataset"]
