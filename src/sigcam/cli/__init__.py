"""The `sigcam` command; the only package that imports typer and rich."""
