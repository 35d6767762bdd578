"""Share branches on the Hugging Face hub: push one with its card, download one that an address names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sigcam.core.errors import CheckpointError, ConfigError, MissingExtra, SigcamError
from sigcam.core.files import raise_if_full
from sigcam.models.builders import hub_answers
from sigcam.models.classifier import check_model_name
from sigcam.network.branch_card import branch_card

if TYPE_CHECKING:
    from sigcam.network.dual import DualBranch

PREFIX, HUB_FILE = "hf://", "branch.safetensors"
REPOSITORY = r"[\w.-]+/[\w.-]+"
ADDRESS = re.compile(rf"{PREFIX}(?P<repo>{REPOSITORY})(@(?P<revision>[^\s@]+))?")
LOGIN = "log in with `hf auth login`, or set $HF_TOKEN"


def is_hub_address(name: object) -> bool:
    """Whether a branch is named by an address of the hub, rather than by a file."""
    return isinstance(name, str) and name.startswith(PREFIX)


def download_branch(address: str) -> Path:
    """Return the branch file of hf://USER/REPO or hf://USER/REPO@REVISION: from the hub or, where that does
    not answer, from its cache on this machine."""
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(
            f"{address} is no address of a branch: give hf://USER/REPO or hf://USER/REPO@REVISION."
        )
    with _one_line_errors(address):
        from huggingface_hub import hf_hub_download

        online, revision = hub_answers(), found["revision"]
        return Path(hf_hub_download(found["repo"], HUB_FILE, revision=revision, local_files_only=not online))


def push_branch(
    net: DualBranch,
    repo: str,
    *,
    model: str | None = None,
    license: str | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload the branch and its card in one commit; return the address of that commit, for `load`."""
    if re.fullmatch(REPOSITORY, repo) is None:
        raise ConfigError(f"cannot push to {repo!r}: name the repository as USER/REPO.")
    if model is not None:
        check_model_name(model)
        if model.startswith("file:"):
            raise ConfigError(
                f"model={model!r} is a file of this machine: leave it out, and describe it in the card."
            )
    if not net.fitted:
        raise CheckpointError("this branch was never fitted, so nobody could use it: fit it, then push it.")
    with _one_line_errors(f"{PREFIX}{repo}"), TemporaryDirectory() as folder:
        from huggingface_hub import CommitOperationAdd, HfApi

        card = branch_card(net, repo, model=model, license=license)
        if not hub_answers():
            raise CheckpointError(f"cannot push to {repo}: the hub does not answer.")
        net.save(file := Path(folder, HUB_FILE))
        api = HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True)
        files = [CommitOperationAdd(HUB_FILE, file), CommitOperationAdd("README.md", card.encode())]
        commit = api.create_commit(repo, files, commit_message="Upload a sigcam branch")
        return f"{PREFIX}{repo}@{commit.oid}"


@contextmanager
def _one_line_errors(address: str) -> Iterator[None]:
    """Turn the errors of the hub's client into ours. Its own messages are left out: they have several lines,
    and one about a malformed token holds the token."""
    try:
        from huggingface_hub import constants, errors
    except ImportError:
        raise MissingExtra("the hub", "huggingface_hub", "hub") from None
    repo, _, revision = address.removeprefix(PREFIX).partition("@")
    try:
        yield
    except errors.GatedRepoError:
        reason = f"its owner gives access on request: ask for it on its page, then {LOGIN}."
    except errors.RepositoryNotFoundError:
        reason = f"the hub has no such repository, or it is private: check the name, or {LOGIN}."
    except errors.RevisionNotFoundError:
        reason = f"{repo} has no revision {revision!r}: give one of its branches, tags or commits."
    except errors.LocalEntryNotFoundError:
        reason = "the hub does not answer, and this branch is not in its cache: give a branch file."
    except errors.EntryNotFoundError:
        reason = f"{repo} holds no {HUB_FILE}, which net.push_to_hub({repo!r}) would write."
    except errors.HFValidationError:
        reason = f"{repo!r} cannot be the name of a repository."
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        denied = f": {LOGIN}, with a token that may write there" if status in (401, 403) else ""
        reason = f"the hub refused with status {status}{denied}."
    except SigcamError:
        raise
    except Exception as error:  # of the client's HTTP library, which differs between its versions
        raise_if_full(error, Path(constants.HF_HUB_CACHE))
        reason = f"the exchange with the hub failed ({type(error).__name__}): try again."
    else:
        return
    raise CheckpointError(f"{address}: {reason}") from None
