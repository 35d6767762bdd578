"""DeepFeatureFactorization and GuidedBackpropReLUModel, with the call signatures of pytorch-grad-cam."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigcam.methods.backpropagation import guided_gradients
from sigcam.methods.compat import GradCAM
from sigcam.methods.concepts import factorize
from sigcam.methods.inputs import choose_classes
from sigcam.methods.probe import Probe
from sigcam.methods.row_scores import NumpyArray


class DeepFeatureFactorization:
    """Concepts in the features of images (Collins et al., 2018), see `sigcam.factorize`.

    Args:
        computation_on_concepts: A module that is called on the concepts' channels (K, N), such as the model's
            last layer.
    """

    def __init__(
        self,
        model: nn.Module,
        target_layer: str | nn.Module | None = None,
        reshape_transform: object = None,
        computation_on_concepts: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._cam = GradCAM(model, None if target_layer is None else [target_layer], reshape_transform)
        self.computation_on_concepts = computation_on_concepts

    def __call__(self, input_tensor: Tensor, n_components: int = 16) -> tuple[NumpyArray, ...]:
        """Return concepts (N, K) and their maps (B, K, H, W), and with `computation_on_concepts` its (K, ...)
        result."""
        net, images = self._cam.attached(input_tensor)
        layers = self._cam.layers
        found = factorize(net, images, n_components, layer=layers[0] if layers else None)
        results = [found.vectors.T, found.maps]
        if self.computation_on_concepts is not None:
            with torch.no_grad():
                results.append(self.computation_on_concepts(found.vectors))
        return tuple(each.cpu().numpy() for each in results)


class GuidedBackpropReLUModel:
    """Gradients of one image; ReLUs let positive ones alone pass back (Springenberg et al., 2015)."""

    def __init__(self, model: nn.Module, device: object = None) -> None:
        self._cam = GradCAM(model)

    def __call__(self, input_img: Tensor, target_category: int | None = None) -> NumpyArray:
        """Return the signed gradient (H, W, C) of the class, by default the predicted one, of a (1, C, H, W)
        image."""
        net, image = self._cam.attached(input_img)
        with torch.no_grad():
            forward_pass = net.run(image)
            classes, _ = choose_classes(net, forward_pass, target_category)
            gradients = guided_gradients(Probe(net, forward_pass, self._cam.branch, classes))
        return gradients[0, 0].movedim(0, -1).cpu().numpy()
