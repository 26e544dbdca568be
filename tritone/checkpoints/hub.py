"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from tritone.checkpoints.progress import Progress
from tritone.errors import TritoneError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab*", "spk_dict.pt")
IGNORED = ("*/*", "*.bin", "*.pth")


def cached_checkpoint(name: str) -> Path | None:
    """The directory of ``name`` in the hub's own cache, of which config.json at least is there. No network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def fetch_checkpoint(name: str, progress: Progress) -> Path:
    """Downloads what is missing of ``name`` into the hub's own cache (it shows its own progress bars) and returns the
    directory. Raises TritoneError naming the checkpoint when it cannot be had."""
    from huggingface_hub import snapshot_download

    progress(f"fetching {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS), ignore_patterns=list(IGNORED)))
    except Exception as error:  # the hub's errors have no common base: HTTP, cache and validation errors
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TritoneError(
            f"checkpoint {name} could not be fetched from the hub ({first}); with no network give a directory that holds it: "
            f"--checkpoint /path/to/{name.rpartition('/')[2]}",
            "NOT_FOUND",
        ) from None
