"""Measure maps on annotated images: a network and samples to a `Result`."""
