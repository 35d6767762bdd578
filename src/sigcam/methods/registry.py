"""METHODS: the registry of CAM methods, with all facts about one; MapConfig: the settings of a map."""

from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Integral
from typing import Concatenate, Literal, ParamSpec, Self, get_args

from torch import Tensor

from sigcam.core.errors import ConfigError, MissingExtra
from sigcam.methods.probe import Probe
from sigcam.methods.targets import Branch, Target, TargetName, as_target

Function = Callable[[Probe], Tensor]
Facts = ParamSpec("Facts")
Scale = Literal["unit", "raw", "logit", "probability"]
MapSize = Literal["image", "features"] | tuple[int, int] | None  # (height, width)
Fusion = Literal["mean", "max", "product"]  # of several layers' maps


@dataclass(frozen=True)
class Method:
    """A CAM method: a function of a Probe, and facts about it. The defaults suit any function that returns
    channel weights and computes them from the given pass.

    Args:
        gives: "weights" that broadcast over F (B, K, N, P, Q); "gradients", weights per cell, which raw maps
            multiply by P x Q; finished "maps" (B, K, P, Q); or maps of "pixels" (B, K, H, W).
        finish: How a map becomes a score map (PROTOCOL 4.3). "relu": drop negative values, scale to [0, 1],
            resize bilinearly (path B). "min-max": resize bicubically, scale from minimum to maximum (path A).
        fusion: How maps of several layers are combined unless told: their mean, or their maximum as in
            Layer-CAM.
        needs: What the network must have: a global average + "linear" head, ViT "attention", both, with the
            head on the "patches" beside a class token, or no function for which the method has no "rules".
        perturbs: What the method alters and runs again, if anything: "images" behind a mask for each channel,
            "features", or images by "noise".
        class_specific: Whether maps of two classes differ.
        signed: Whether weights can be negative, so that clamping changes the map; features may be too.
        in_logits: Whether raw maps are in logits; otherwise the unit is the method's own.
        linear_twin: The method with the same unit maps if the head is global average + linear.
        light: The weights hold at most (B, K, N) numbers, so all classes can be computed at once.
        samples: Default number of samples that the method averages over or steps that it takes, if any.
        passes: How many images a sample, or the method as a whole, runs through the network.
        package: A package that it needs, of the extra `attribution`.
        aliases: Other spellings of the name, lower case, without dashes.
    """

    function: Function
    gives: Literal["weights", "gradients", "maps", "pixels"] = "weights"
    finish: Literal["relu", "min-max"] = "relu"
    fusion: Fusion = "mean"
    needs: Literal["linear", "attention", "patches", "rules"] | None = None
    perturbs: Literal["images", "features", "noise"] | None = None
    class_specific: bool = True
    signed: bool = True
    in_logits: bool = False
    linear_twin: str | None = None
    light: bool = False
    samples: int | None = None
    passes: int = 1
    package: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def weights_channels(self) -> bool:
        """Whether maps are weighted sums of channels."""
        return self.gives in ("weights", "gradients")

    @property
    def tries_channels(self) -> bool:
        """Whether the method masks images by channels, of which it can be told to try fewer."""
        return self.weights_channels and self.perturbs == "images"

    @property
    def masks_are_resized(self) -> bool:
        """Whether a map that masks an image is scaled before it is resized (PROTOCOL 6)."""
        return self.finish == "min-max" and self.weights_channels

    @property
    def follows_head(self) -> bool:
        """Whether a change of the head alone shows in the map without running images again."""
        rerun = self.perturbs in ("images", "noise") or self.gives == "pixels"
        return self.class_specific and not rerun

    @property
    def available(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.package is None or find_spec(self.package) is not None

    def __call__(self, probe: Probe) -> Tensor:
        """Return the weights, gradients or maps of the batch."""
        return self.function(probe)


METHODS: dict[str, Method] = {}


def list_methods() -> list[str]:
    """Return the names of all registered CAM methods."""
    return list(METHODS)


def _registering(
    create: Callable[Concatenate[Function, Facts], Method],
) -> Callable[Concatenate[str, Facts], Callable[[Function], Function]]:
    """Return a decorator factory that takes a name and the facts that `create` takes."""

    def method(name: str, /, *args: Facts.args, **facts: Facts.kwargs) -> Callable[[Function], Function]:
        """Register the decorated function under `name`; `facts` are the fields of `Method`."""

        if not isinstance(name, str):
            raise ConfigError('a method needs a name: write @method("my-cam").')

        def register(function: Function) -> Function:
            known = METHODS.get(name)
            if known and known.function.__module__ != function.__module__:  # a cell may run twice
                raise ConfigError(f"there is a method {name!r} already: choose another name.")
            METHODS[name] = create(function, *args, **facts)
            return function

        return register

    return method


method = _registering(Method)


def method_name(name: str) -> str:
    """Return the registered name for any spelling of it; ConfigError suggests the nearest name."""
    if not isinstance(name, str):
        raise ConfigError(f"method is a name such as 'grad-cam', not {name!r}.")
    normalized = _normalized(name)
    for registered, facts in METHODS.items():
        if normalized == _normalized(registered) or normalized in facts.aliases:
            return registered
    if normalized == "finercam":
        raise ConfigError("'finer-cam' is a target, for any method: explain(..., target='finer-cam').")
    if normalized == "refinecam":
        fusing = "explain(..., 'grad-cam++', layers=['layer3', 'layer4'], fusion='product')"
        raise ConfigError(f"'refine-cam' is the product of several layers' maps, by any method: {fusing}.")
    close = get_close_matches(name.lower().replace("_", "-"), METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"unknown method {name!r}: {hint}there are {', '.join(METHODS)}.")


def _normalized(name: str) -> str:
    """Return a name in lower case without separators."""
    return name.lower().translate({ord(separator): None for separator in "-_ "})


@dataclass(frozen=True)
class MapConfig:
    """Settings of a map; see the arguments of `explain`."""

    method: str = "grad-cam"
    branch: Branch = "sigmoid"
    clamp: bool | None = None
    target: Target | TargetName = "class"
    scale: Scale = "unit"
    batch_size: int | None = None
    top_n: int | None = None
    eigen_smooth: bool = False
    samples: int | None = None
    fusion: Fusion | None = None

    def checked(self) -> Self:
        """Return the config with its defaults filled in; ConfigError if a value is unknown."""
        if self.branch not in ("sigmoid", "softmax", "centred"):
            raise ConfigError(f"unknown branch {self.branch!r}: there are sigmoid, softmax and centred.")
        if self.scale not in get_args(Scale):
            raise ConfigError(f"unknown scale {self.scale!r}: there are {', '.join(get_args(Scale))}.")
        if self.fusion not in (None, *get_args(Fusion)):
            raise ConfigError(f"unknown fusion {self.fusion!r}: there are {', '.join(get_args(Fusion))}.")
        if self.clamp not in (None, True, False):
            raise ConfigError(f"clamp is True, False or None (the branch's default), not {self.clamp!r}.")
        batch_size, top_n = _count("batch_size", self.batch_size), _count("top_n", self.top_n)
        samples = _count("samples", self.samples)
        as_target(self.target, self.branch)
        clamp = self.clamp
        if clamp is None:  # the softmax baseline keeps its signed weights
            clamp = self.branch == "sigmoid" and self.scale == "unit"
        name = method_name(self.method)
        if top_n is not None and not METHODS[name].tries_channels:
            *trying, last = (each for each, facts in METHODS.items() if facts.tries_channels)
            known = f"{', '.join(trying)} and {last}"
            raise ConfigError(f"top_n is a number of channels to try, for {known}: {name} tries none.")
        if samples is not None and METHODS[name].samples is None:
            taking = ", ".join(each for each, facts in METHODS.items() if facts.samples)
            raise ConfigError(f"samples is a number of masks, noises or steps, for {taking}: not for {name}.")
        if self.eigen_smooth not in (False, True):
            raise ConfigError(f"eigen_smooth is True or False, not {self.eigen_smooth!r}.")
        if self.eigen_smooth and not METHODS[name].weights_channels:
            raise ConfigError(
                f"eigen_smooth smooths weighted channels, and {name} weights none: leave it out."
            )
        checked = replace(self, method=name, clamp=clamp, batch_size=batch_size, top_n=top_n, samples=samples)
        if self.absolute:
            checked.check_absolute()
        if not METHODS[name].available:
            raise MissingExtra(name, str(METHODS[name].package), "attribution")
        return checked

    @property
    def passes(self) -> int:
        """How many images the method runs through the network for each image of the user."""
        facts = METHODS[self.method]
        return (self.samples or facts.samples or 1) * facts.passes

    def within(self, passes: int, channels: int) -> Self:
        """Return the config with fewer channels to try, or fewer samples, where a map would take more passes
        of a network whose features have so many channels."""
        facts = METHODS[self.method]
        tried = min(self.top_n or channels, channels) if facts.tries_channels else 1
        if self.passes * tried <= passes:
            return self
        if facts.tries_channels:
            return replace(self, top_n=max(1, passes // self.passes))
        return replace(self, samples=max(1, passes // facts.passes)) if facts.samples else self

    @property
    def absolute(self) -> bool:
        """Whether cells are scored so that their mean is the branch's logit."""
        return self.scale in ("logit", "probability")

    def check_absolute(self) -> None:
        """Raise ConfigError if cells of these maps have no score that adds up to the branch's logit."""
        scale, in_logits = f"scale={self.scale!r}", [name for name, m in METHODS.items() if m.in_logits]
        if not METHODS[self.method].in_logits:
            raise ConfigError(
                f"{scale} needs maps in logits, as by {', '.join(in_logits)}, not {self.method}."
            )
        if self.eigen_smooth:
            raise ConfigError(f"{scale} adds up all of the evidence: leave eigen_smooth out.")
        if self.clamp:
            raise ConfigError(f"{scale} adds up positive and negative weights: leave clamp out.")
        if self.target_name != "class":
            raise ConfigError(f"{scale} is for the class's own logit: leave target={self.target_name!r} out.")
        if self.scale == "probability" and self.branch != "sigmoid":
            raise ConfigError(
                f"{scale} is calibrated for the sigmoid branch: use scale='logit' for this one."
            )

    def check_fusion(self, layers: Sized | None) -> None:
        """Raise ConfigError if there are no maps to fuse."""
        if self.fusion is not None and len(layers or ()) < 2:
            few = "is for maps of several layers: name two or more in layers="
            raise ConfigError(f"fusion={self.fusion!r} {few}.")

    @property
    def target_name(self) -> str:
        """The name of the target or of its function."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "custom")


def _count(name: str, value: object) -> int | None:
    """Return a setting as an int of 1 or more, or None; ConfigError if it is anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, not {value!r}.")
    if int(value) < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value}.")
    return int(value)
