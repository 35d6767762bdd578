"""Labels as the classifier numbers them, the class-balanced loss on them (Eq. 12), splits apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sigcam.core.errors import DataError
from sigcam.data.sample import Samples


def match_classes(samples: Samples, classes: int, names: Sequence[str] | None) -> Samples:
    """The samples with labels of the classifier: by name when both have names, by order when the counts
    agree, or when names differ in spelling alone."""
    count = len(samples.classes)
    wrong = next((s for s in samples if s.label is not None and not 0 <= s.label < count), None)
    if wrong is not None:
        raise DataError(
            f"image {wrong.id} has label {wrong.label}, but there are {count} classes (0 to {count - 1})."
        )
    if names and set(samples.classes) <= set(names):
        place = {name: i for i, name in enumerate(names)}
        moved = tuple(
            sample if sample.label is None else replace(sample, label=place[samples.classes[sample.label]])
            for sample in samples
        )
        return Samples(moved, tuple(names))
    if names and len(names) == len(samples.classes) and all(map(_alike, samples.classes, names)):
        return samples
    strangers = [name for name in samples.classes if names and name not in names]
    if names and 0 < len(strangers) < len(
        samples.classes
    ):  # a slip, which order would turn into wrong labels
        raise DataError(
            f"{len(strangers)} of {len(samples.classes)} class names are not the classifier's: "
            f"{', '.join(strangers[:3])}. Rename or remove their folders."
        )
    if len(samples.classes) == max(classes, 2):
        return samples
    known = f" ({', '.join(list(names)[:3])}, ...)" if names else ""
    raise DataError(
        f"the data has {len(samples.classes)} classes ({', '.join(samples.classes[:3])}, ...), the "
        "classifier "
        f"{classes}{known}: name the folders after its classes, or train a head for yours with "
        "`sigcam train-classifier --probe`."
    )


def check_disjoint(samples: Samples, others: Samples, why: str) -> None:
    """DataError if an image is among both."""
    known = {sample.path or sample.id for sample in others}
    shared = [sample.id for sample in samples if (sample.path or sample.id) in known]
    if shared:
        raise DataError(f"{len(shared)} of {len(samples)} images, the first {shared[0]}, {why}")


def _alike(ours: str, theirs: str) -> bool:
    """Whether two class names differ in spelling alone: case, underscores, the WordNet id of a homonym."""
    ours, theirs = (name.replace("_", " ").casefold() for name in (ours, theirs))
    bare = re.sub(r" n\d{8}$", "", ours)
    return ours == theirs or (bare != ours and theirs.startswith(bare))
