"""Files to samples: annotated images, the data set readers, and the loader."""

from sigcam.data.registry import READERS, open_dataset
from sigcam.data.sample import Sample, Samples

__all__ = ["READERS", "Sample", "Samples", "open_dataset"]
