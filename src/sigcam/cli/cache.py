"""`sigcam cache`: list cached features, or remove them."""

import json
from dataclasses import dataclass

import typer

from sigcam.cli.console import say, show_table
from sigcam.cli.options import CacheOptions, JsonOptions, option


@dataclass(frozen=True, kw_only=True)
class ListCachesOptions(CacheOptions, JsonOptions):
    """Options of `sigcam cache list`."""


@dataclass(frozen=True, kw_only=True)
class ClearCachesOptions(CacheOptions):
    """Options of `sigcam cache clear`."""

    names: list[str] | None = option("Caches to remove; default: all.", None, argument=True)


def list_caches_command(options: ListCachesOptions) -> None:
    """Show the cached features and their size on disk."""
    from sigcam.training.feature_cache import default_folder, list_caches

    root = options.cache or default_folder()
    rows = [
        {
            "name": cache.folder.name,
            "model": cache.about.get("model", "?"),
            "layer": cache.about.get("layer", "?"),
            "holds": "maps"
            if "maps" in cache.about
            else "backgrounds"
            if "background" in cache.about
            else "features",
            "view": "mirrored" if cache.about.get("view") else "plain",
            "images": cache.about.get("images", 0),
            "megabytes": round(cache.size / 1e6, 1),
        }
        for cache in list_caches(root)
    ]
    if options.json:
        typer.echo(json.dumps({"folder": str(root), "caches": rows}, indent=1))
        return
    if rows:
        show_table("caches", [tuple(row.values()) for row in rows], header=tuple(rows[0]))
    say(f"{len(rows)} cache(s), {sum(row['megabytes'] for row in rows):.1f} MB in {root}")


def clear_caches_command(options: ClearCachesOptions) -> None:
    """Remove cached features; they are computed again when needed."""
    from sigcam.training.feature_cache import clear_caches, default_folder

    removed = clear_caches(options.cache or default_folder(), options.names or ())
    say(f"removed {len(removed)} cache(s), {sum(cache.size for cache in removed) / 1e6:.1f} MB")
