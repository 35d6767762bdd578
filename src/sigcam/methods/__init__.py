"""CAM methods: from a forward pass to an `Explanation`."""

from sigcam.methods import formulas as formulas  # registers the methods
from sigcam.methods.registry import METHODS, Method, method

__all__ = ["METHODS", "Method", "method"]
