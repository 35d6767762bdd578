"""Run the command line: bad input is one line on stderr and exit code 2."""

import sys
from typing import Any

import typer

from sigcam.cli.app import build_app
from sigcam.core.errors import SigcamError


def main() -> None:
    """Run the command that was typed; errors of the user end in one line and exit code 2."""
    usage_error: Any = typer.BadParameter.__mro__[2]  # ClickException, of the click that typer uses
    try:
        status = build_app()(sys.argv[1:] or ["--help"], standalone_mode=False)
        raise SystemExit(status if isinstance(status, int) else 0)
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
            print(error.format_message())
            raise SystemExit(2) from None
        fail(f"{error.format_message().rstrip('.')}. See sigcam --help.")
    except SigcamError as error:
        fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    except RuntimeError as error:
        fail(f"the model could not be run on these pictures ({str(error).splitlines()[0]}).")
    except (KeyboardInterrupt, typer.Abort):
        print("sigcam: stopped.", file=sys.stderr)
        raise SystemExit(130) from None


def fail(message: str) -> None:
    """Print one line to stderr and exit with code 2."""
    print(f"sigcam: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)
