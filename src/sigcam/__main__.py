"""`python -m sigcam` and the `sigcam` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command; bad input ends with one line and exit code 2, never a traceback."""
    from sigcam.cli import app
    from sigcam.errors import SigcamError

    try:
        app()
    except SigcamError as error:
        fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        print("sigcam: stopped. Nothing half-written is left behind.", file=sys.stderr)
        raise SystemExit(130) from None


def fail(message: str) -> None:
    """One line to stderr, exit code 2."""
    print(f"sigcam: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
