"""The doors of explain, net(images) and fit: whatever does not fit is refused in a sentence of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sigcam.core.config import FitConfig
from sigcam.core.errors import AttachError, ConfigError, DataError
from sigcam.methods.explainer import explain
from sigcam.methods.inputs import class_number
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from support.nets import PlainVit
from support.tiny import Failing, Gap, Vgg, attached, images


def named(*names: str) -> DualBranch:
    net = attached(Gap())
    net.class_names = names
    return net


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


IMAGES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "uint8": (lambda x: x.byte(), "images are uint8: give floating-point images, normalised"),
    "int64": (lambda x: x.long(), "images are int64: give floating-point images"),
    "bool": (lambda x: x > 0, "images are bool: give floating-point images"),
    "complex": (lambda x: x.to(torch.complex64), "images are complex64: give floating-point images"),
    "float64": (
        lambda x: x.double(),
        r"images are float64, the network float32: .*images\.to\(torch\.float32\)",
    ),
    "float16": (lambda x: x.half(), "images are float16, the network float32"),
    "one channel": (lambda x: x[:, :1], r"\(3, 1, 16, 16\) have 1 channel\(s\), and this Gap takes 3"),
    "four channels": (lambda x: torch.cat([x, x[:, :1]], 1), r"have 4 channel\(s\), and this Gap takes 3"),
    "channels last": (
        lambda x: x.permute(0, 2, 3, 1),
        r"\(3, 16, 16, 3\) have 16 channel.*give \(B, 3, H, W\)",
    ),
    "meta": (lambda x: x.to("meta"), "tensors on the meta device hold no values"),
    "sparse": (lambda x: x.to_sparse(), "images must be dense tensors"),
    "no pixels": (lambda x: x[:, :, :0], r"images must be \(B, C, H, W\) with B >= 1, not \(3, 3, 0, 16\)"),
    "no images": (lambda x: x[:0], r"images must be \(B, C, H, W\) with B >= 1, not \(0, 3, 16, 16\)"),
    "one image": (lambda x: x[0], r"images must be \(B, C, H, W\)"),
    "an array": (lambda x: x.numpy(), r"images must be a \(B, C, H, W\) tensor.*not ndarray"),
    "nothing": (lambda x: None, r"images must be a \(B, C, H, W\) tensor.*not NoneType"),
}


@pytest.mark.parametrize("door", ["explain", "forward"])
@pytest.mark.parametrize("kind", IMAGES)
def test_images_that_the_network_fails_on_are_refused_in_a_sentence(kind: str, door: str) -> None:
    net, (change, sentence) = attached(Gap()), IMAGES[kind]
    if kind == "no images" and door == "forward":
        assert net(change(images())).softmax.shape == (0, 4)  # as for any module
        return
    with pytest.raises(DataError, match=sentence) as caught:
        explain(net, change(images())) if door == "explain" else net(change(images()))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates quantized tensors
def test_quantized_images_are_refused_in_a_sentence() -> None:
    with pytest.raises(DataError, match="images must be dense tensors"):
        explain(attached(Gap()), quantized(images()))


def test_a_model_on_the_meta_device_is_refused_in_a_sentence() -> None:
    net = attached(Gap()).to("meta")
    for given in (images(), images().to("meta")):
        with pytest.raises(DataError, match="tensors on the meta device hold no values"):
            explain(net, given)


@pytest.mark.parametrize("example", [None, images(1)])
def test_attach_refuses_a_model_on_the_meta_device(example: Tensor | None) -> None:
    with pytest.raises(
        AttachError, match="on the meta device, which holds no values: load its weights first"
    ):
        attach(Gap().to("meta"), example=example)


def test_a_list_of_tensors_is_refused_with_what_makes_a_batch_of_it() -> None:
    net = attached(Gap())
    for given in (list(images()), [images()[0], images()[0, :, :8]]):
        with pytest.raises(DataError, match=r"images are a list of tensors: .*torch\.stack"):
            explain(net, given)  # type: ignore[arg-type]


def test_images_of_another_size_than_a_fixed_one_are_refused_with_that_size() -> None:
    net = attach(PlainVit((32, 48)), example=torch.randn(1, 3, 32, 48))
    with pytest.raises(
        DataError, match=r"images are 64x64, and this PlainVit does not .*resize them to 32x48\."
    ):
        explain(net, torch.randn(2, 3, 64, 64), branch="centred")


def test_images_that_require_a_gradient_are_explained_as_others_are() -> None:
    net, x = attached(Vgg()), images()
    assert torch.equal(explain(net, x.clone().requires_grad_()).maps, explain(net, x).maps)


def test_a_model_that_takes_bytes_itself_is_given_them() -> None:
    class Bytes(Gap):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float() / 255)

    net = attached(Bytes())
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(explain(net, pixels).maps, explain(net, pixels.float()).maps)


def test_autocast_takes_images_in_half_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(attached(Gap()), images().bfloat16()).maps.shape == (3, 16, 16)


def test_an_error_that_is_not_the_images_fault_stays_what_it_is() -> None:
    model = nn.Sequential(
        Gap().body, failing := Failing(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    net = attached(model)
    failing.broken = ZeroDivisionError("a bug")
    for x in (images(), images(size=32)):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            explain(net, x)
    failing.broken = torch.cuda.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        explain(net, images(size=32))


def test_a_transform_that_makes_several_sizes_is_refused() -> None:
    net = attached(Gap())
    net.transform = lambda picture: torch.zeros(3, picture.height, 16)
    pictures = [Image.new("RGB", (16, height)) for height in (16, 24)]
    with pytest.raises(DataError, match=r"net\.transform returned \(3, 16, 16\) and \(3, 24, 16\)"):
        explain(net, pictures)
    net.transform = lambda picture: picture
    with pytest.raises(DataError, match=r"net\.transform returned Image: let it return tensors"):
        explain(net, pictures[:1])


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_fit_refuses_images_of_bytes_and_of_one_channel(recipe: Any) -> None:
    labels = torch.arange(8) % 4
    config = FitConfig(recipe=recipe, epochs=None if recipe == "fast" else 1)
    for x, sentence in (
        (images(8).byte(), "images are uint8: give floating-point images"),
        (images(8)[:, :1], r"have 1 channel\(s\), and this Gap takes 3"),
    ):
        with pytest.raises(DataError, match=sentence):
            fit(attached(Gap()), DataLoader(TensorDataset(x, labels), batch_size=4), config)


# ----------------------------------------------------------------------------------------------- classes


def test_classes_may_be_named() -> None:
    net = named("cat", "dog", "cow", "hen")
    for names, numbers in (
        ("cow", 2),
        (["cat", "dog", "hen"], [0, 1, 3]),
        (("hen", 1, "cat"), [3, 1, 0]),
        ([["cat", "dog"]] * 3, [[0, 1]] * 3),
    ):
        one, other = (explain(net, images(), classes=each) for each in (names, numbers))  # type: ignore[arg-type]
        assert torch.equal(one.classes, other.classes) and torch.equal(one.maps, other.maps)


def test_a_name_that_no_class_has_or_two_have_is_refused() -> None:
    net = named("crane", "heron", "crane", "hawk")
    with pytest.raises(ConfigError, match=r"2 classes are named 'crane': give one of their numbers, 0, 2\."):
        explain(net, images(), classes="crane")
    with pytest.raises(ConfigError, match=r"no class is named 'haron': did you mean heron"):
        explain(net, images(), classes=["heron", "haron", "hawk"])
    with pytest.raises(ConfigError, match=r"classes='cat' is unknown: give indices"):
        explain(attached(Gap()), images(), classes=["cat", "dog", "cow"])


CATS = (
    "tabby, tabby cat",
    "Egyptian cat",
    "tiger cat",
    "crate",
    "pug, pug-dog",
    "coffee_mug",
    "castle",
    "Pug",
    "hot dog",
)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pug", 7),  # the whole name
        ("tabby", 0),  # a synonym
        ("Tabby Cat", 0),
        ("pug dog", 4),
        ("egyptian", 1),  # a word of one name only
        ("coffee mug", 5),
        ("MUG", 5),
        ("castle", 6),
        ("3", 3),
    ],
)
def test_a_name_synonym_or_word_that_one_class_has_means_it(name: str, number: int) -> None:
    assert class_number(named(*CATS), name) == number


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "cat",
            "no class is named 'cat'; these names contain it: tabby, tabby cat, Egyptian cat, tiger cat.",
        ),
        ("dog", "these names contain it: pug, pug-dog, hot dog. Give"),
        ("cra", "these names contain it: crate. Give"),  # part of a word lists, and does not choose
        ("castel", "no class is named 'castel': did you mean castle"),
        ("?!", "no class is named '?!'."),
        ("", "no class is named ''."),
    ],
)
def test_a_name_that_several_classes_have_lists_them_words_first(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        class_number(named(*CATS), name)


def test_a_long_list_of_classes_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"and 5 more\. Give one of them"):
        class_number(named(*(f"cat {i}" for i in range(15))), "cat")


def test_a_class_called_all_is_found_by_its_number_only() -> None:
    assert explain(named("all", "b", "c", "d"), images(), classes="all").classes.shape == (3, 4)


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ([[0, 1], [1], [2]], r"classes must be whole numbers or class names, not \[\[0, 1\]"),
        ({0, 1, 2}, r"class names, not \{0, 1, 2\} \(set\)"),
        ([None, 1, 2], "class names, not"),
        (2**70, "class names, not 1180591620717411303424"),
        (np.array(["cat"] * 3), "class names, not"),
        (torch.zeros(3, dtype=torch.long, device="meta"), "class names, not"),
        (torch.zeros(3, dtype=torch.complex64), "whole numbers, not torch.complex64"),
        ([True, False, True], "whole numbers, not torch.bool"),
        ([], r"classes of shape \(0,\) hold no class"),
        (torch.zeros(3, 0, dtype=torch.long), r"classes of shape \(3, 0\) hold no class"),
    ],
)
def test_classes_of_no_use_are_refused_in_a_sentence(classes: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        explain(attached(Gap()), images(), classes=classes)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------ settings, thresholds

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"zoom": True}, "zoom must be a number of at least 1, not True"),
    ({"zoom": 1e300}, r"zoom=1e\+300 is too large"),
    ({"stride": True}, "stride is 1 .* or None, not True"),
    ({"size": (0, 5)}, r"size must be at least \(1, 1\), not \(0, 5\)"),
    ({"size": (-1, 5)}, r"size must be at least \(1, 1\)"),
    ({"size": (2.5, 2)}, r"size is 'image', 'features' or \(height, width\), not \(2\.5, 2\)"),
    ({"size": (True, True)}, "size is 'image'"),
    ({"size": ("a", 2)}, "size is 'image'"),
    ({"size": 5}, "size is 'image'"),
    ({"size": "picture"}, "size is 'image'"),
    ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
    ({"batch_size": "2"}, "batch_size must be a whole number, not '2'"),
    (
        {"top_n": 4},
        "top_n is a number of channels to try, for score-cam, ss-cam and is-cam: grad-cam tries none",
    ),
    ({"eigen_smooth": "no"}, "eigen_smooth is True or False, not 'no'"),
    (
        {"eigen_smooth": True, "method": "rollout"},
        "eigen_smooth smooths weighted channels, and attention-rollout",
    ),
    ({"eigen_smooth": True, "scale": "logit"}, "adds up all of the evidence: leave eigen_smooth out"),
    ({"top_n": True}, "top_n must be a whole number, not True"),
    ({"clamp": "yes"}, "clamp is True, False or None"),
    ({"aug_smooth": "no"}, "aug_smooth is True or False, not 'no'"),
    ({"method": 5}, "method is a name such as 'grad-cam', not 5"),
    ({"layers": "layer4"}, "layers is a list of layers"),
    ({"layers": nn.ReLU()}, "layers is a list of layers"),
    ({"fusion": "sum"}, "unknown fusion 'sum': there are mean, max, product"),
    ({"fusion": "product"}, "fusion='product' is for maps of several layers: name two or more in layers="),
    ({"fusion": "mean", "layers": ["body"]}, "name two or more"),
    ({"method": "RefineCAM"}, "is the product of several layers' maps, by any method: explain"),
]


@pytest.mark.parametrize(("options", "sentence"), SETTINGS)
def test_settings_of_another_type_or_range_are_refused_in_a_sentence(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        explain(attached(Gap()), images(), **options)


def test_numbers_of_numpy_are_numbers() -> None:
    net = attached(Gap())
    ex = explain(net, images(), "score-cam", batch_size=np.int64(2), top_n=np.int32(3), zoom=np.float32(2))
    assert ex.maps.shape == (3, 16, 16)
    assert explain(net, images(), size=np.array([5, 9])).maps.shape == (3, 5, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [2, -0.1, float("nan"), True, "0.2", [0.2]])
def test_a_threshold_is_a_number_from_zero_to_one(threshold: Any) -> None:
    ex = explain(attached(Gap()), images())
    for draw in (
        lambda: ex.boxes(threshold),
        lambda: ex.overlay(boxes=threshold),
        lambda: ex.overlay(contour=threshold),
    ):
        with pytest.raises(ConfigError, match="a threshold must be a number from 0 to 1, not"):
            draw()
    assert len(ex.boxes(0)) == len(ex.boxes(1)) == len(ex.boxes(torch.tensor(0.5))) == 3  # type: ignore[arg-type]


def test_boxes_are_of_the_largest_contour_or_of_all() -> None:
    ex = explain(attached(Gap()), images())
    with pytest.raises(ConfigError, match="mode is 'largest' or 'all', not 'biggest'"):
        ex.boxes(0.2, "biggest")  # type: ignore[arg-type]
