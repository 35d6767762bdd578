"""Features that were computed elsewhere, in an .npz file."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from sigcam.core.errors import DataError
from sigcam.training.features import Features


def read_features(path: Path) -> Features:
    """Read features from an .npz file with `plain` (n, N), optionally `mirrored`, and `labels`."""
    try:
        with np.load(path) as arrays:
            views = [torch.from_numpy(arrays[name]) for name in ("plain", "mirrored") if name in arrays]
            labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise DataError(
            f"cannot read {path} as features: {error}. It must be an .npz file with arrays plain and labels."
        ) from error
    if not views:
        raise DataError(f"{path} has no array named plain: the features of the unaltered images.")
    return Features(tuple(views), labels)
