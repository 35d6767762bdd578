"""`sigcam.bootstrap`: confidence intervals over images; the code is in `sigcam.metrics.bootstrap`."""

from sigcam.metrics.bootstrap import Interval, interval, paired

__all__ = ["Interval", "interval", "paired"]
