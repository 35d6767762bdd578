"""Trained classifiers by name: weights, preprocessing and class names."""

from sigcam.models.classifier import Classifier, load_classifier
from sigcam.models.preprocess import Preprocess

__all__ = ["Classifier", "Preprocess", "load_classifier"]
