"""Around every command: its output folder is locked; what stops it says whether the command resumes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sigcam.core.lock import locked_folder

RESUMES = "The same command goes on from here."


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; ends a command as Ctrl-C does."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM ended the command: typer would turn KeyboardInterrupt into a silent exit."""


@contextmanager
def running(options: Any) -> Iterator[None]:
    """Lock the folder `options.output`, if there is one; note on errors that the command resumes, if so."""
    try:
        with ExitStack() as stack:
            folder = getattr(options, "output", None)
            if folder is not None and os.environ.get("RANK", "0") == "0":  # set by torchrun
                stack.enter_context(locked_folder(folder))
            yield
    except BaseException as error:  # also while the folder is unlocked
        if getattr(options, "resumes", False):
            error.add_note(RESUMES)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted from error
        raise
