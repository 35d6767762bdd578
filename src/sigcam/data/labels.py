"""Map the labels of a data set to a classifier's classes; check that two splits share no image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples


def match_classes(samples: Samples, classes: int, names: Sequence[str] | None) -> Samples:
    """Return the samples with the classifier's labels.

    Classes are matched by name if the classifier has all of the names, otherwise by position: if the names
    differ only in spelling, or if none of them is the classifier's and the counts agree.
    """
    count = len(samples.classes)
    invalid = next((s for s in samples if s.label is not None and not 0 <= s.label < count), None)
    if invalid is not None:
        raise DataError(
            f"image {invalid.id} has label {invalid.label}, but there are {count} classes (0 to {count - 1})."
        )
    if names and set(samples.classes) <= set(names):
        label_of = {name: label for label, name in enumerate(names)}
        relabelled = tuple(
            sample if sample.label is None else replace(sample, label=label_of[samples.classes[sample.label]])
            for sample in samples
        )
        return Samples(relabelled, tuple(names))
    if names and len(names) == count and all(map(_same_name, samples.classes, names)):
        return samples
    unknown = [name for name in samples.classes if names and name not in names]
    if 0 < len(unknown) < count:  # probably a typo: matching by position would give wrong labels
        raise DataError(
            f"{len(unknown)} of {count} class names are not the classifier's: "
            f"{', '.join(unknown[:3])}. Rename or remove their folders."
        )
    if count == max(classes, 2):
        return samples
    known = f" ({', '.join(list(names)[:3])}, ...)" if names else ""
    raise DataError(
        f"the data has {count} classes ({', '.join(samples.classes[:3])}, ...), the classifier "
        f"{classes}{known}: name the folders after its classes, or train a head for yours with "
        "`sigcam train-classifier --probe`."
    )


def check_disjoint(samples: Samples, others: Samples, why: str) -> None:
    """Raise DataError, ending with `why`, if an image is in both."""
    known = {sample.path or sample.id for sample in others}
    shared = [sample.id for sample in samples if (sample.path or sample.id) in known]
    if shared:
        raise DataError(f"{len(shared)} of {len(samples)} images, the first {shared[0]}, {why}")


def _same_name(ours: str, theirs: str) -> bool:
    """Return whether two class names differ only in case, underscores or the WordNet id of a homonym."""
    ours, theirs = (name.replace("_", " ").casefold() for name in (ours, theirs))
    without_id = re.sub(r" n\d{8}$", "", ours)
    return ours == theirs or (without_id != ours and theirs.startswith(without_id))
