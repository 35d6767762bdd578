"""`sigcam ui`: the page in the browser."""

import typer

from sigcam.ui.serve import UiOptions, serve


def ui_command(options: UiOptions) -> None:
    """Explore maps in the browser, on a page that only this machine can reach unless you say otherwise."""
    serve(options, typer.echo)
