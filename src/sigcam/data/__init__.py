"""Files to samples: annotated images, the data set readers, and the loader."""

from sigcam.data.sample import READERS, Sample, Samples, open_dataset

__all__ = ["READERS", "Sample", "Samples", "open_dataset"]
