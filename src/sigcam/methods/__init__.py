"""CAM methods: from a forward pass to an `Explanation`."""

from sigcam.methods import formulas as formulas  # these register the methods

from sigcam.methods import attributions as attributions  # isort: skip
from sigcam.methods import perturbations as perturbations  # isort: skip
from sigcam.methods import backpropagation as backpropagation  # isort: skip
from sigcam.methods import legrad as legrad  # isort: skip
from sigcam.methods.registry import METHODS, Method, method

__all__ = ["METHODS", "Method", "method"]
