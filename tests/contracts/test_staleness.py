"""What is kept for a later run is taken up by the same work alone: change one ingredient, and the run equals
one that starts afresh, bit for bit.

ROWS names the ingredients by command; a new command needs rows here, or a line in KEEPS_NOTHING.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from sigcam.bench import tables
from sigcam.bench.plan import Plan
from sigcam.bench.runner import run_bench
from sigcam.cli.app import COMMANDS
from sigcam.core import checkpoint
from sigcam.core.config import FitConfig, TrainConfig
from sigcam.core.errors import ConfigError
from sigcam.data.images import open_image, open_masks
from sigcam.data.sample import Sample, Samples
from sigcam.evaluation import metric_table
from sigcam.evaluation.evaluator import evaluate
from sigcam.methods.folder import ExplainConfig, explain_samples
from sigcam.methods.registry import METHODS
from sigcam.metrics import bootstrap
from sigcam.models.classifier import Classifier, load_classifier, save_classifier
from sigcam.models.preprocess import Preprocess
from sigcam.network.attachment import attach
from sigcam.network.dual import DualBranch
from sigcam.training import classifier as classifier_training
from sigcam.training import recipes
from sigcam.training.branch import fit
from sigcam.training.classifier import train_classifier
from sigcam.training.feature_reader import HeadInputs
from sigcam.training.linear_probe import train_probe
from support.bench import write_model, write_wsol_dataset

SIZE, CLASSES = 16, ("a", "b", "c", "d")
PLAIN = Preprocess(SIZE, SIZE)
GIVEN = "given/cub/classifier.safetensors"


class Stopped(BaseException):
    """Ends a run in the middle."""


class Net(nn.Module):
    """A classifier whose `forward` has a number that neither its weights nor its repr tell."""

    slope = 0.0

    def __init__(self, stride: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=stride, padding=1), nn.SiLU())
        self.fc = nn.Linear(6, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        logits: Tensor = self.fc((features + self.slope * features**2).mean((2, 3)))
        return logits


@dataclass
class World:
    """All that a run reads; the changes below alter one part of it."""

    folder: Path
    patch: pytest.MonkeyPatch
    labels: list[int] = field(default_factory=lambda: [i % 4 for i in range(8)])
    boxes: list[tuple[int, int, int, int]] = field(
        default_factory=lambda: [(1, 2, 9 + i, 12) for i in range(8)]
    )
    class_names: tuple[str, ...] = CLASSES
    stride: int = 2
    slope: float = 0.0
    weights: int = 0  # seeds
    branch: int = 1
    dtype: torch.dtype = torch.float32
    transform: Any = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)

    def samples(self, name: str = "images") -> Samples:
        items = list[Sample]()
        for i, path in enumerate(sorted((self.folder / name).iterdir())):
            mask = self.folder / "masks" / path.name
            items.append(
                Sample(
                    f"{name}/{path.name}",
                    partial(open_image, path),
                    self.labels[i],
                    (self.boxes[i],),
                    partial(open_masks, (mask,), ()) if mask.exists() else None,
                    path=path,
                )
            )
        return Samples(tuple(items), CLASSES)

    def classifier(self) -> Classifier:
        torch.manual_seed(self.weights)
        model = Net(self.stride)
        model.slope = self.slope
        return Classifier(model.to(self.dtype).eval(), self.transform, self.class_names, "net")

    def net(self) -> DualBranch:
        known: Any = {"transform": self.transform, "class_names": self.class_names}
        net = attach(
            self.classifier().model, example=torch.zeros(1, 3, SIZE, SIZE, dtype=self.dtype), **known
        )
        with torch.no_grad():
            for parameter in net.sigmoid.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(self.branch))
                parameter.copy_(noise * 0.3)
        net.fitted = True
        return net


FLATTEN = """

class Flatten(nn.Flatten):
    def forward(self, x):
        return super().forward(x) ** 1
"""


def picture(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (18, 20, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_world(folder: Path) -> None:
    for i in range(8):
        picture(folder / "images" / f"{i}.png", i)
        mask = np.zeros((18, 20), np.uint8)
        mask[3:12, 2 : 8 + i] = 255
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
        if i < 4:
            picture(folder / "val" / f"{i}.png", 100 + i)
            picture(folder / "negatives" / f"{i}.png", 200 + i)


def write_bench_world(folder: Path) -> None:
    write_wsol_dataset(folder / "masked", "openimages", classes=3, per_class=2, masks=True)
    write_wsol_dataset(folder / "data", "cub", classes=3, per_class=2)
    spec = write_model(folder / "model.py")
    source = (folder / "model.py").read_text().replace("nn.Flatten()", "Flatten()")
    (folder / "model.py").write_text(source + FLATTEN)
    write_given(folder, load_classifier(spec, num_classes=3).model, (0, 1, 2))


def write_given(folder: Path, model: nn.Module, order: tuple[int, ...]) -> None:
    file, names = folder / GIVEN, [f"class {k}" for k in order]
    save_classifier(file, model, spec="file:model.py:make", classes=names)


# ----------------------------------------------------------------------------------------------- the commands


Progress = Callable[[str, int, int], None]


def bits(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (str(tensor.dtype), tensor.flatten().tolist()) for name, tensor in state.items()}


def run_explain(world: World, kept: Path, progress: Progress) -> Any:
    config = ExplainConfig(**{"method": "grad-cam", "branch": "sigmoid", **world.settings})
    how: Any = {"batch_size": 1, "progress": progress}  # the last bits depend on what else is in a batch
    made = explain_samples(world.net(), world.samples(), kept, config, **how)
    names = [row[key] for row in made.rows for key in ("map", "overlay")]
    files = {name: (kept / name).read_bytes() for name in names}
    return made.rows, files


def run_evaluate(world: World, kept: Path, progress: Progress) -> Any:
    settings: Any = {"methods": ["grad-cam"], "batch_size": 2, **world.settings}
    settings["metrics"] = ["max_box_acc_v2", "pxap", "average_drop", "mean_map", "top1_cls"]
    found = evaluate(
        world.net(), world.samples(), unfinished=kept / "unfinished", progress=progress, **settings
    )
    return [{**row, "clamp": str(row["clamp"])} for row in found.rows]


def run_fit(world: World, kept: Path, progress: Progress, recipe: Any = "paper") -> Any:
    fast = recipe == "fast"
    config = FitConfig(recipe=recipe, epochs=None if fast else 2, batch_size=4, l2=0.1 if fast else "auto")
    if not fast:
        config = replace(config, lr=0.01)
    others = world.samples("negatives") if fast else None
    net = world.net()
    config = replace(config, **world.settings)
    result = fit(net, world.samples(), config, negatives=others, cache=kept, progress=progress)
    return result.losses, bits(net.sigmoid.state_dict()), net.calibration.to_json(), result.evidence_quality


def run_train(world: World, kept: Path, progress: Progress) -> Any:
    config = TrainConfig(**{"epochs": 2, "batch_size": 4, **world.settings})
    path, val = kept / "checkpoint.pt", world.samples("val")
    for _ in range(2):
        classifier = world.classifier()
        try:
            found = train_classifier(
                classifier, world.samples(), config, val=val, checkpoint=path, progress=progress
            )
        except ConfigError as error:
            assert "belongs to another training run" in str(error) and "remove it" in str(error)
            path.unlink()
        else:
            epochs = [{**asdict(epoch), "seconds": 0} for epoch in found.epochs]
            return epochs, bits(classifier.model.state_dict())
    raise AssertionError("refused twice")


def run_table(world: World, kept: Path, progress: Progress) -> Any:
    """The rows of table 2, from paths that are the same in every copy of the world."""
    world.patch.chdir(world.folder)
    settings = {"data": Path("data"), "zoom": 1.0, "batch_size": 2, **world.settings}
    plan = Plan(output=kept, localization_images=4, backbone="file:model.py:make", **settings)
    run_bench("table2", plan, progress=progress, announce=lambda text: None)
    return json.loads((kept / "table2.json").read_text())["rows"]


@dataclass(frozen=True)
class Work:
    """A run that keeps something, and the point at which it is stopped; None lets it finish."""

    run: Callable[[World, Path, Progress], Any]
    stop: Callable[[str, int], bool] | None
    code: Callable[[pytest.MonkeyPatch], None]  # what an edit of sigcam's own code does


def other_formula(patch: pytest.MonkeyPatch) -> None:
    method = METHODS["grad-cam"]
    formula = method.function
    patch.setitem(METHODS, "grad-cam", replace(method, function=lambda probe: -formula(probe)))


def halved_features(patch: pytest.MonkeyPatch) -> None:
    compute = HeadInputs.compute
    patch.setattr(HeadInputs, "compute", lambda *args: [each / 2 for each in compute(*args)])


def plain_views(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recipes, "augmented", lambda transform: transform)


def halved_steps(patch: pytest.MonkeyPatch) -> None:
    entropy = torch.nn.functional.cross_entropy
    patch.setattr(classifier_training.F, "cross_entropy", lambda *args: entropy(*args) / 2)


def in_epoch_2(stage: str, done: int) -> bool:
    return stage == "epoch 2"


WORKS: dict[str, Work] = {
    "explain": Work(run_explain, lambda stage, done: done >= 4, other_formula),
    "evaluate": Work(run_evaluate, lambda stage, done: done >= 4, other_formula),
    "fit, fast": Work(partial(run_fit, recipe="fast"), None, halved_features),
    "fit, paper": Work(partial(run_fit, recipe="paper"), in_epoch_2, plain_views),
    "fit, paper-code": Work(partial(run_fit, recipe="paper-code"), in_epoch_2, plain_views),
    "train-classifier": Work(run_train, lambda stage, done: done > 12, halved_steps),
    "bench": Work(run_table, None, other_formula),
}
KEEPS_NOTHING = {
    "export": "writes one file whole",
    "inspect": "prints",
    "ui": "keeps fitted branches as files of their own",
    "demo": "writes results alone",
    "cache list": "prints",
    "cache clear": "removes",
}


# ------------------------------------------------------------------------------------------------ the changes


def unchanged(world: World) -> None:
    pass


def pixels(world: World) -> None:
    picture(world.folder / "images" / "1.png", 50)


def last_pixels(world: World) -> None:
    picture(world.folder / "images" / "7.png", 50)


def labels(world: World) -> None:
    world.labels[:4] = world.labels[3::-1]


def masks(world: World) -> None:
    path = world.folder / "masks" / "0.png"
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)


def boxes(world: World) -> None:
    world.boxes[0] = (0, 0, 3, 3)


def preprocessing(world: World) -> None:
    world.transform = Preprocess(SIZE, SIZE, mean=(0.3, 0.4, 0.5))


def shifted(shift: float) -> Callable[[Image.Image], Tensor]:
    """A transform whose repr does not tell by how much it shifts."""
    return lambda image: PLAIN(image) + shift


def own_transform(world: World) -> None:
    world.transform = shifted(0.0)


def edited_transform(world: World) -> None:
    world.transform = shifted(0.5)


def classifier_weights(world: World) -> None:
    world.weights = 3


def branch_weights(world: World) -> None:
    world.branch = 4


def structure(world: World) -> None:
    world.stride = 1


def forward_code(world: World) -> None:
    world.slope = 0.5


def class_names(world: World) -> None:
    world.class_names = ("b", "a", "c", "d")


def dtype(world: World) -> None:
    world.dtype = torch.float64


def fewer_val_images(world: World) -> None:
    (world.folder / "val" / "0.png").unlink()


def negative_pixels(world: World) -> None:
    picture(world.folder / "negatives" / "1.png", 78)


def threads(world: World) -> None:
    """Pretends to have another number of threads, on which the last bits depend."""
    world.patch.setattr(torch, "get_num_threads", lambda: 7)


def set_to(**settings: Any) -> Callable[[World], None]:
    return lambda world: world.settings.update(settings)


def inverted(*names: str) -> Callable[[World], None]:
    """Inverts the pictures in these folders."""

    def change(world: World) -> None:
        for path in (path for name in names for path in (world.folder / name).iterdir()):
            Image.fromarray(255 - np.asarray(Image.open(path))).save(path)

    return change


def use_masks(world: World) -> None:
    world.settings["data"] = Path("masked")


def data_labels(world: World) -> None:
    for split in ("train", "test"):
        path = world.folder / "data/cub/metadata" / split / "class_labels.txt"
        first, second, *rest = path.read_text().split("\n")
        path.write_text("\n".join([first[:-1] + second[-1], second[:-1] + first[-1], *rest]))


def data_boxes(world: World) -> None:
    path = world.folder / "data/cub/metadata/test/localization.txt"
    lines = [f"{line.split(',')[0]},0,0,5,5" for line in path.read_text().split("\n")]
    path.write_text("\n".join(lines))


def edit(old: str, new: str) -> Callable[[World], None]:
    """Edits the file of the model."""

    def change(world: World) -> None:
        path = world.folder / "model.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def given(world: World) -> None:
    world.settings["classifiers"] = Path("given")


def given_names(world: World) -> None:
    """The given classifiers have the same weights, and their classes in another order."""
    model = load_classifier(f"file:{world.folder}/model.py:make", weights=world.folder / GIVEN).model
    write_given(world.folder, model, (1, 0, 2))


NETWORK = {
    "pixels": pixels,
    "pixels of the last": last_pixels,
    "preprocessing": preprocessing,
    "code of a transform": edited_transform,
    "weights of the classifier": classifier_weights,
    "weights of the branch": branch_weights,
    "structure": structure,
    "code of forward": forward_code,
    "dtype": dtype,
    "threads": threads,
}
SOFTWARE = {"code": None, "versions": None}  # made by the test itself
ROWS: dict[str, dict[str, Callable[[World], None] | None]] = {
    "explain": {
        **NETWORK,
        "class names": class_names,
        "method": set_to(method="layer-cam"),
        "head": set_to(branch="softmax"),
        "clamp": set_to(clamp=False),
        "zoom": set_to(zoom=2.0),
        **SOFTWARE,
    },
    "evaluate": {
        **NETWORK,
        "labels": labels,
        "class names": class_names,
        "boxes": boxes,
        "masks": masks,
        "method": set_to(methods=["layer-cam"]),
        "clamps": set_to(clamps=(False,)),
        "classes of maps": set_to(class_from="predicted"),
        "batch size": set_to(batch_size=4),
        "threshold": set_to(threshold="percentile"),
        **SOFTWARE,
    },
    "fit, fast": {  # a linear head is solved for, whatever the branch starts from
        **{name: change for name, change in NETWORK.items() if name != "weights of the branch"},
        "labels": labels,
        "class names": class_names,
        "negatives": negative_pixels,
        "views": set_to(views=2),
        "precision": set_to(precision="bfloat16"),
        "autocast": set_to(autocast=True),
        "penalty": set_to(l2=0.01),
        "background": set_to(background=1.0),
        "no background": set_to(background=0),
        "weight of backgrounds": set_to(background=3.0),
        "threshold of backgrounds": set_to(background_threshold=0.6),
        "labels of backgrounds": labels,
        "pixels of backgrounds": pixels,
        "seed": set_to(seed=2),
        "zooms": set_to(zooms=(1.0, 2.0)),
        "larger zooms": set_to(zooms=(1.0, 3.0)),
        "loss": set_to(loss="background-softmax"),
        **SOFTWARE,
    },
    "fit, paper": {
        **NETWORK,
        "labels": labels,
        "class names": class_names,
        "learning rate": set_to(lr=0.02),
        "seed": set_to(seed=1),
        "autocast": set_to(autocast=True),
        **SOFTWARE,
    },
    "fit, paper-code": {
        **NETWORK,
        "labels": labels,
        "class names": class_names,
        "decay": set_to(decay_every=1),
        **SOFTWARE,
    },
    "train-classifier": {
        **{name: NETWORK[name] for name in NETWORK if name not in ("weights of the branch", "dtype")},
        "labels": labels,
        "images of the validation": fewer_val_images,
        "learning rate": set_to(lr=0.02),
        "seed": set_to(seed=1),
        "trainer": set_to(wsol="has"),
        **SOFTWARE,
    },
    "bench": {
        "pixels": inverted("data/cub/images/test"),
        "pixels to learn from": inverted("data/cub/images/train"),
        "labels": data_labels,
        "boxes": data_boxes,
        "masks": inverted("masked/openimages/masks/test"),
        "weights of the classifier": edit("manual_seed(0)", "manual_seed(33)"),
        "structure": edit("Conv2d(3, 16, 5, 4, 2)", "Conv2d(3, 16, 5, 2, 2)"),
        "code of forward": edit("** 1", "** 2"),
        "given classifiers": given,
        "class names": given_names,
        "seed": set_to(seed=3),
        "zoom": set_to(zoom=2.0),
        "threads": threads,
        **SOFTWARE,
    },
}
WITH_BACKGROUND = set_to(background=1.0, background_threshold=0.4)
STARTS = {  # what is there before the change, where it is not the world as it is
    "code of a transform": own_transform,
    "class names of bench": given,
    "masks of bench": use_masks,
    "no background": WITH_BACKGROUND,
    "weight of backgrounds": WITH_BACKGROUND,
    "threshold of backgrounds": WITH_BACKGROUND,
    "labels of backgrounds": WITH_BACKGROUND,
    "pixels of backgrounds": WITH_BACKGROUND,
    "seed of fit, fast": WITH_BACKGROUND,
    "zooms": WITH_BACKGROUND,
    "larger zooms": set_to(background=1.0, zooms=(1.0, 2.0)),
    "loss": WITH_BACKGROUND,
}
ALL = [(name, row) for name, rows in ROWS.items() for row in rows]
SLOW = {"bench": pytest.mark.slow}
SHARED = dict[tuple[str, str], tuple[Path, Any, int]]()
ONLY_BITS = {"threads"}  # the results need not differ


def test_every_command_has_rows_or_keeps_nothing() -> None:
    kept = {name.partition(",")[0] for name in ROWS}
    assert kept | KEEPS_NOTHING.keys() == COMMANDS.keys() and not kept & KEEPS_NOTHING.keys()
    assert ROWS.keys() == WORKS.keys()
    recipes = {name.partition(", ")[2] for name in ROWS if name.startswith("fit")}
    assert recipes == {"fast", "paper", "paper-code"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_table, "EVERY", 0.0)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(tables, "MAP_VARIANTS", {"branches": ("softmax", "sigmoid"), "clamps": (True,)})
    monkeypatch.setattr(tables, "methods_for", lambda net: ("grad-cam",))
    draws = bootstrap._draws
    monkeypatch.setattr(bootstrap, "_draws", lambda images, resamples, seed: draws(images, 20, seed))


def whole(work: Work, world: World, kept: Path, stop: bool = False) -> tuple[Any, int]:
    """The result of a run, None if it was stopped, and how many files of pictures it opened."""
    opened, real = list[str](), Image.open

    def counted(file: Any, *args: Any) -> Any:
        opened.append(str(file))
        return real(file, *args)

    def progress(stage: str, done: int, total: int) -> None:
        if stop and work.stop and work.stop(stage, done):
            raise Stopped

    kept.mkdir(parents=True, exist_ok=True)
    world.patch.setattr(Image, "open", counted)
    try:
        return work.run(world, kept, progress), len(opened)
    except Stopped:
        return None, len(opened)
    finally:
        world.patch.setattr(Image, "open", real)


Begun = Callable[[str, str], tuple[World, Any, int]]


@pytest.fixture
def begun(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Makes a world; what a run that was stopped in it keeps is in the folder `kept` beside it. Returns the
    world, and of a run that nothing stops its result and how many files it opened."""

    def begin(folder: Path, name: str, start: str) -> tuple[Any, int]:
        (write_bench_world if name == "bench" else write_world)(folder / "world")
        world = World(folder / "world", monkeypatch)
        STARTS.get(start, unchanged)(world)
        whole(WORKS[name], world, folder / "kept", stop=True)
        assert start or any((folder / "kept").iterdir())
        return whole(WORKS[name], world, folder / "whole")

    def copied(name: str, start: str) -> tuple[World, Any, int]:
        if name == "bench":  # takes long, and does not mind that files are copied
            if (name, start) not in SHARED:
                folder = tmp_path_factory.mktemp("begun")
                SHARED[name, start] = folder, *begin(folder, name, start)
            folder, *result = SHARED[name, start]
            shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        else:
            result = begin(tmp_path, name, start)
        world = World(tmp_path / "world", monkeypatch)
        STARTS.get(start, unchanged)(world)
        return world, *result

    return copied


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_the_same_work_goes_on(name: str, begun: Begun, tmp_path: Path) -> None:
    world, wanted, all_opened = begun(name, "")
    found, opened = whole(WORKS[name], world, tmp_path / "kept")
    assert found == wanted
    assert opened < all_opened


@pytest.mark.parametrize(("name", "row"), [pytest.param(*row, marks=SLOW.get(row[0], ())) for row in ALL])
def test_a_run_after_a_change_equals_a_fresh_one(
    name: str, row: str, begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = next((key for key in (f"{row} of {name}", row) if key in STARTS), "")
    world, before, _ = begun(name, start)
    work, change = WORKS[name], ROWS[name][row]
    if change is None:
        work.code(monkeypatch)
        which = "code_fingerprint" if row == "code" else "versions"
        monkeypatch.setattr(checkpoint, which, lambda: {"torch": "0.1"})
    else:
        change(world)
    found, opened = whole(work, world, tmp_path / "kept")
    wanted, all_opened = whole(work, world, tmp_path / "fresh")
    assert found == wanted
    if row in ONLY_BITS:
        assert opened == all_opened
    else:
        assert before != wanted  # else the row proves nothing


def test_a_fit_with_backgrounds_opens_no_picture_again_and_one_size_more_only_those_of_it(
    begun: Begun, tmp_path: Path
) -> None:
    world, wanted, all_opened = begun("fit, fast", "zooms")
    assert world.settings["background"] == 1.0
    work, kept = WORKS["fit, fast"], tmp_path / "kept"
    assert whole(work, world, kept) == (wanted, 0)
    ROWS["fit, fast"]["zooms"](world)  # type: ignore[misc]
    found, opened = whole(work, world, kept)
    assert found[:2] == wanted[:2] and found[2]["maps"].keys() == {"1", "2"}  # the branch stays
    assert 0 < opened < all_opened
    assert whole(work, world, kept) == (found, 0)


def test_a_probe_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_world(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIGCAM_CACHE", str(tmp_path / "cache"))
    train_probe(World(tmp_path, monkeypatch).classifier(), World(tmp_path, monkeypatch).samples(), epochs=1)
    assert sorted(tmp_path.rglob("*")) == before
