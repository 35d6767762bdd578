"""Branch files: what is saved comes back, what does not fit is refused, old files still load."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sigcam
from sigcam.core.config import FitConfig
from sigcam.core.errors import AttachError, CheckpointError
from sigcam.models.state_dict import checksum, fingerprint
from sigcam.network.attachment import attach
from sigcam.network.branch_file import load
from sigcam.network.dual import DualBranch
from sigcam.training.branch import fit
from support.tiny import Gap, InPlace, Normed, Probabilities, TwoHeads, Vgg, easy_data, images

MODELS: list[Callable[[], nn.Module]] = [Gap, Vgg, Normed, InPlace, Probabilities, TwoHeads]
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["gap", "vgg"])
@pytest.mark.parametrize("given_example", [True, False])
def test_a_branch_saved_by_version_0_1_0_gives_the_numbers_of_then(name: str, given_example: bool) -> None:
    model = {"gap": Gap, "vgg": Vgg}[name]()
    model.load_state_dict(load_file(GOLDEN / f"classifier_{name}_0.1.0.safetensors"))
    expected = json.loads((GOLDEN / "branch_0.1.0.json").read_text())[name]
    net = load(
        GOLDEN / f"branch_{name}_0.1.0.safetensors", model, example=images(1) if given_example else None
    )
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    out = net(x)
    assert torch.allclose(out.softmax, torch.tensor(expected["softmax"]), rtol=1e-5, atol=1e-6)
    assert torch.allclose(out.sigmoid, torch.tensor(expected["sigmoid"]), rtol=1e-5, atol=1e-6)
    if name == "gap":
        maps = sigcam.explain(net, x, "grad-cam", size="features").maps
        assert torch.allclose(maps, torch.tensor(expected["map"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gap", "vgg"])
def test_a_branch_of_version_0_1_0_saved_again_only_adds_what_was_found(name: str, tmp_path: Path) -> None:
    model = {"gap": Gap, "vgg": Vgg}[name]()
    model.load_state_dict(load_file(GOLDEN / f"classifier_{name}_0.1.0.safetensors"))
    old, again = GOLDEN / f"branch_{name}_0.1.0.safetensors", tmp_path / "again.safetensors"
    load(old, model, example=images(1)).save(again)
    before, after = load_file(old), load_file(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {key: value for key, value in _about(again).items() if key != "found"} == _about(old)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[DualBranch, Path]:
    net = attach(Vgg(), example=images(1))
    fit(net, easy_data(), FitConfig("paper", epochs=2))
    net.class_names = ("hawk", "owl", "heron", "wren")
    path = tmp_path / "branch.safetensors"
    net.save(path)
    return net, path


def test_a_saved_branch_comes_back_to_the_bit(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    back = load(path, copy.deepcopy(net.model), example=images(1))
    assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)
    assert back.class_names == ("hawk", "owl", "heron", "wren")
    assert back.recipe == net.recipe
    assert back.recipe["epochs"] == 2
    assert back.fitted
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("make", MODELS)
def test_every_kind_of_branch_can_be_saved_unfitted_too(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    net = attach(make(), example=images(1), seed=3)
    net.save(tmp_path / "b.safetensors")
    back = load(str(tmp_path / "b.safetensors"), net.model, example=images(1))
    assert not back.fitted
    assert back.class_names is None
    assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)


def test_named_head_and_layer_are_found_again_on_loading(tmp_path: Path) -> None:
    model = Vgg()
    net = attach(model, head="classifier.3", layer="features.0", example=images(1))
    net.save(tmp_path / "b.safetensors")
    back = load(tmp_path / "b.safetensors", model, example=images(1))
    assert (back.split.heads, back.split.layer) == (("classifier.3",), "features.0")
    assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)


def passes_of_loading(path: Path, model: nn.Module) -> tuple[DualBranch, int]:
    """The network, and how often the model ran."""
    runs = list[int]()
    handle = model.register_forward_hook(lambda module, args, out: runs.append(1))
    try:
        return load(path, model), len(runs)
    finally:
        handle.remove()


@pytest.mark.parametrize("make", MODELS)
def test_loading_trusts_the_split_in_the_file_after_one_pass(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    net, path = attach(make(), example=images(1)), tmp_path / "b.safetensors"
    net.save(path)
    back, runs = passes_of_loading(path, net.model)
    assert runs == (1 if net.split.whole and net.split.output == "logits" else 2)  # else the tail is recorded
    assert (back.split, back.linear, back.requested) == (net.split, net.linear, net.requested)
    assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)
    assert torch.equal(back.run(images(), grad=True).softmax, net(images()).softmax)


def test_where_the_recorded_split_does_not_hold_it_is_found_again(
    saved: tuple[DualBranch, Path], tmp_path: Path
) -> None:
    net, path = saved
    about, tensors = _about(path), load_file(path)
    found: Any = about["found"]
    split, logits = found["split"], found["logits"]
    damaged: list[Any] = [
        None,
        {},
        found | {"split": None},
        found | {"split": split | {"layer": "features.0"}},
        found | {"split": split | {"call": 2}},
        found | {"split": split | {"fold": {}}},
        found | {"checksum": "0"},
        found | {"logits": [2 * x + 1 for x in logits]},
        found | {"logits": logits[:1]},
    ]
    for number, each in enumerate(damaged):
        other = tmp_path / f"{number}.safetensors"
        save_file(tensors, other, metadata={"sigcam-branch": json.dumps(about | {"found": each})})
        back, runs = passes_of_loading(other, net.model)
        assert runs > 1, each
        assert back.split == net.split
        assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)


def test_a_branch_does_not_load_onto_weights_in_another_order(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    other = copy.deepcopy(net.model)
    with torch.no_grad():
        weight = other.get_parameter("features.0.weight")
        weight.copy_(weight.flip(0))  # which a checksum does not see
    assert checksum(other) == checksum(net.model)
    with pytest.raises(CheckpointError, match="other weights"):
        load(path, other)


def test_a_checksum_sees_every_change_of_a_number_but_not_the_memory_layout() -> None:
    model = Normed()
    before = checksum(model)
    assert checksum(copy.deepcopy(model).to(memory_format=torch.channels_last)) == before
    for name, tensor in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            kept = tensor.clone()
            tensor.view(-1)[-1] += 1e-3
            assert checksum(model) != before, name
            tensor.copy_(kept)
    assert checksum(model) == before


def test_a_file_holds_the_branch_alone(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    assert load_file(path).keys() == net.state_dict().keys()


def refused(path: Path, model: nn.Module) -> str:
    """The sentence with which loading is refused."""
    with pytest.raises(CheckpointError) as caught:
        load(path, model, example=images(1))
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert path.name in sentence
    assert sentence.endswith(".")
    return sentence


def test_other_weights_are_refused(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    other = copy.deepcopy(net.model)
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-6
    assert "other weights" in refused(path, other)


def test_other_batch_norm_statistics_are_other_weights_but_a_count_is_not() -> None:
    model = Normed()
    before = fingerprint(model)
    model.get_buffer("bn1.num_batches_tracked").add_(1)
    assert fingerprint(model) == before
    model.get_buffer("bn1.running_mean").add_(0.1)
    assert fingerprint(model) != before


def test_another_class_count_is_refused(saved: tuple[DualBranch, Path]) -> None:
    assert "with 4 classes after the layer features.4; this Vgg has classifier with 7" in refused(
        saved[1], Vgg(classes=7)
    )


def test_another_architecture_is_refused(saved: tuple[DualBranch, Path]) -> None:
    assert "a head classifier with 4 classes after the layer features.4; this Gap has fc" in refused(
        saved[1], Gap()
    )


def test_a_missing_named_layer_is_refused(tmp_path: Path) -> None:
    net = attach(Vgg(), layer="features.0", example=images(1))
    net.save(tmp_path / "b.safetensors")
    assert "Load it onto the model it was fitted to" in refused(tmp_path / "b.safetensors", Gap())


def test_a_file_that_is_no_branch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    assert "not a sigcam branch" in refused(path, Gap())
    for content in (b"", b"hello", b"\x80\x00\x00\x00\x00\x00\x00\x00{}"):
        path.write_bytes(content)
        assert "not a readable branch file" in refused(path, Gap())


@pytest.mark.parametrize("about", ["{", "[]", "{}", json.dumps({"named": {}, "heads": ["fc"]})])
def test_a_file_with_a_broken_description_is_refused(tmp_path: Path, about: str) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata={"sigcam-branch": about})
    assert "does not say what it was fitted to" in refused(path, Gap())


@pytest.mark.parametrize("ending", ["", "]" * 100_000])
def test_a_description_that_is_nested_without_end_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "deep.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata={"sigcam-branch": "[" * 100_000 + ending})
    assert "does not say what it was fitted to" in refused(path, Gap())


@pytest.mark.parametrize(
    "changed",
    [
        {"classes": "x"},
        {"classes": 0},
        {"classes": True},
        {"class_names": [1, 2, 3, 4]},
        {"class_names": "abcd"},
        {"fingerprint": 7},
        {"fitted": "no"},
        {"heads": "fc"},
        {"heads": []},
        {"heads": [3]},
        {"input": [1e9, 1e9, 1e9]},
        {"input": [3, 10**9, 10**9]},
        {"input": [3, -16, 16]},
        {"input": [16, 16]},
        {"input": 3},
        {"layer": None},
        {"named": []},
        {"named": {"head": ["fc"]}},
        {"recipe": "fast"},
    ],
)
def test_a_description_with_a_value_of_another_kind_is_refused(
    saved: tuple[DualBranch, Path], changed: dict[str, object]
) -> None:
    net, path = saved
    about = {**_about(path), **changed}
    save_file(load_file(path), path, metadata={"sigcam-branch": json.dumps(about)})
    with pytest.raises(CheckpointError, match=f"{path.name} does not say what it was fitted to: fit again"):
        load(path, net.model)


@pytest.mark.parametrize("names", [[], ["hawk", "owl", "wren"], ["x"] * 5])
def test_names_for_another_number_of_classes_are_refused(
    saved: tuple[DualBranch, Path], names: list[str]
) -> None:
    net, path = saved
    about = {**_about(path), "class_names": names}
    save_file(load_file(path), path, metadata={"sigcam-branch": json.dumps(about)})
    assert f"names {len(names)} of 4 classes" in refused(path, net.model)


def test_a_model_without_parameters_is_refused_in_a_sentence(saved: tuple[DualBranch, Path]) -> None:
    with pytest.raises(AttachError):
        load(saved[1], nn.Flatten())


def test_a_truncated_file_is_refused_wherever_it_ends(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    whole = path.read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "not a readable branch file" in refused(path, net.model)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.safetensors", Gap())
    refused(tmp_path, Gap())


def test_not_a_number_inside_is_refused(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    with torch.no_grad():
        next(net.parameters()).view(-1)[3] = float("nan")
    net.save(path)
    assert "NaN or infinite numbers in sigmoid.copies.0.0.weight" in refused(path, net.model)


def test_weights_of_other_types_are_refused_or_converted(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    tensors, about = load_file(path), {"sigcam-branch": json.dumps(_about(path))}
    for dtype in (torch.float8_e4m3fn, torch.float64):
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, metadata=about)
        assert load(path, net.model, example=images(1)).fitted
    save_file({name: tensor.to(torch.int32) for name, tensor in tensors.items()}, path, metadata=about)
    assert "torch.int32 for torch.float32 in sigmoid.copies.0.0.weight" in refused(path, net.model)
    save_file({name: tensor.double() + 1e300 for name, tensor in tensors.items()}, path, metadata=about)
    assert "NaN or infinite numbers" in refused(path, net.model)


def test_a_description_of_any_length_is_refused_in_a_short_sentence(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    about = {**_about(path), "heads": ["x" * 1000] * 1000}
    save_file(load_file(path), path, metadata={"sigcam-branch": json.dumps(about)})
    assert len(refused(path, net.model)) < 1000


def test_tensors_of_other_shapes_are_refused(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    tensors = load_file(path)
    about = {"sigcam-branch": json.dumps(_about(path))}
    tensors.pop("sigmoid.copies.0.3.bias")
    save_file(tensors, path, metadata=about)
    assert "does not fit this Vgg" in refused(path, net.model)


def _about(path: Path) -> dict[str, object]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about: dict[str, object] = json.loads(file.metadata()["sigcam-branch"])
        return about


def test_a_refused_load_leaves_the_model_loadable(saved: tuple[DualBranch, Path]) -> None:
    net, path = saved
    refused(path, Gap())
    assert load(path, net.model, example=images(1)).fitted


def test_saving_where_nothing_can_be_written_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    net = attach(Gap(), example=images(1))
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (tmp_path / "no" / "b.safetensors", file / "b.safetensors"):
        with pytest.raises(CheckpointError, match=r"cannot write .*b\.safetensors: .+\."):
            net.save(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        net.save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert file.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_saving_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        attach(Gap(), example=images(1)).save(tmp_path / "b.safetensors")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left")])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_part(
    saved: tuple[DualBranch, Path], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    net, path = saved
    before = path.read_bytes()

    def half(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise error

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(CheckpointError, match=error.strerror):
        net.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_load_says_that_the_path_comes_first() -> None:
    with pytest.raises(CheckpointError, match="a path, then the model"):
        load(Gap(), "branch.safetensors")  # type: ignore[arg-type]
