"""How often the seeded tests repeat: few times in `make test`, often in `make soak`."""

import os


def soak_count(short: int, long: int) -> int:
    """Return `long` when the environment variable SIGCAM_SOAK is set and not empty, otherwise `short`."""
    return long if os.environ.get("SIGCAM_SOAK") else short
