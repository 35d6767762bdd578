"""On annotated photographs that $SIGCAM_DATA names: the embedded weights see, a fitted branch tells."""

from pathlib import Path

import pytest
import torch

import sigcam
from sigcam.data.loader import load_batches
from sigcam.data.readers.folder import folder
from sigcam.data.sample import Samples
from sigcam.models.classifier import Classifier, load_classifier
from sigcam.training.linear_probe import train_probe

pytestmark = pytest.mark.realdata


def predictions(classifier: Classifier, samples: Samples) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [classifier.model(b.images) for b in load_batches(samples, classifier.transform, batch_size=8)]
        )


def test_the_embedded_classifier_recognises_photographs(real_data: Path):
    # folders in the order of their WordNet ids, as the labels are
    pictures = folder(real_data / "ilsvrc" / "images")
    assert len(pictures.classes) == 1000
    some = Samples(pictures.items[::10], pictures.classes)
    found = predictions(load_classifier("embedded"), some).argmax(1)
    right = (found == torch.tensor([sample.label for sample in some])).double().mean()
    assert 0.6 < right < 0.95, right  # published: 75 % of the whole validation set


def test_a_branch_fitted_on_birds_gives_the_right_class_the_most_evidence(real_data: Path):
    birds = folder(real_data / "cub" / "images")
    names = birds.classes[:4]
    kept = [sample for sample in birds if sample.label is not None and sample.label < len(names)]
    train, test = (
        Samples(tuple(kept[i] for i in range(len(kept)) if (i % 3 == 0) == held), names)
        for held in (False, True)
    )
    classifier = load_classifier("embedded", num_classes=len(names))
    train_probe(classifier, train)
    before = predictions(classifier, test)
    net = sigcam.attach(classifier.model)
    sigcam.fit(net, train, transform=classifier.transform)
    assert torch.equal(predictions(classifier, test), before)
    with torch.no_grad():
        evidence = torch.cat(
            [net(b.images).sigmoid for b in load_batches(test, classifier.transform, batch_size=8)]
        )
    labels = torch.tensor([sample.label for sample in test])
    assert (evidence.argmax(1) == labels).double().mean() > 0.5
    assert evidence[torch.arange(len(labels)), labels].mean() > 0 > evidence.mean()
