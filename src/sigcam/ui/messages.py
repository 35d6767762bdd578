"""What visitors are told of errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import gradio as gr

from sigcam.core.errors import SigcamError

log = logging.getLogger("sigcam")


@contextmanager
def show_errors() -> Iterator[None]:
    """Show errors on the page: ours as they are, unexpected ones as a reference to the log."""
    try:
        yield
    except Exception as error:
        raise gr.Error(escape(sentence(error)), print_exception=False) from error


def sentence(error: BaseException) -> str:
    """Return what visitors are told of an error; an unexpected one goes to the log."""
    if isinstance(error, SigcamError):
        return str(error)
    log.error("the page failed to answer a request", exc_info=error)
    return "Unexpected error: see the server's log."
