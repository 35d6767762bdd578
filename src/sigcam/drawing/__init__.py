"""Tensors to pictures: overlays, charts, contact sheets."""
