"""Trained classifiers by name: weights, preprocessing and class names."""

from sigcam.models.classifier import Classifier, Preprocess, load_classifier

__all__ = ["Classifier", "Preprocess", "load_classifier"]
