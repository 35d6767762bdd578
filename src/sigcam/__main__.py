"""`python -m sigcam` and the `sigcam` command."""

from sigcam.cli.main import main

if __name__ == "__main__":
    main()
