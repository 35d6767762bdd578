"""`--weights imagenet`: torchvision's weights or, where they cannot be downloaded, those of a package."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sigcam.cli.console import say
from sigcam.core.errors import ConfigError, ModelError

WORD = Path("imagenet")
PAIRS = (("model", "weights"), ("compare_model", "compare_weights"))  # options that belong together


def with_imagenet_weights(options: Any) -> Any:
    """Return a command's options with the word `imagenet` replaced by the weights that it stands for, and the
    model by the form of it that these weights are for; say which on stderr."""
    for model_name, weights_name in PAIRS:
        if getattr(options, weights_name, None) == WORD and not WORD.is_file():
            if getattr(getattr(options, "config", None), "pretrained", True) is False:
                raise ConfigError("--weights imagenet and --no-pretrained are opposites: give one of them.")
            model = getattr(options, model_name) or getattr(options, "model", None) or "embedded"
            model, weights = _find(model, head=getattr(options, "needs_head", True))
            options = replace(options, **{model_name: model, weights_name: weights})
    return options


def _find(model: str, *, head: bool) -> tuple[str, Path | None]:
    """Return the model to open and the file of its weights; None for torchvision's own."""
    from sigcam.bench.weights import imagenet_weights, published_form
    from sigcam.models.builders import download_torchvision
    from sigcam.models.state_dict import weights_facts

    if not model.startswith(("torchvision:", "wsol:")):
        raise ConfigError(
            f"--weights imagenet is for torchvision:NAME and wsol:NAME; {model} has its own: leave it out."
        )
    try:
        file = download_torchvision(model)
    except ModelError:
        if published_form(model) is None:
            raise
    else:
        _note(f"weights of {model}: torchvision's {file}")
        return model, None
    form, path = imagenet_weights(model, head=head)
    facts = weights_facts(form, path)
    package = f"{facts['package']} {facts['version']} ({facts['registry']})"
    _note(f"weights of {form}: {facts['form']}, from {package}; torchvision's cannot be had here")
    if form != model:
        reason = "in the network of these weights the stride of a stage is in its first convolution"
        _note(f"{model} is opened as {form}: {reason}")
    return form, path


def _note(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        say(text, err=True)
