"""The tokenizer of a checkpoint directory: ``tokenizer.json`` is what counts, where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> Tokenizer:
    """Without what only prompts need: the checkpoint's ``tokenizer.json``, or what transformers makes of older files."""
    path = directory / FILE
    return Tokenizer.from_file(str(path)) if path.is_file() else prompt_tokenizer(directory).backend_tokenizer


def prompt_tokenizer(directory: Path) -> Any:
    """The tokenizer of transformers, with the chat template and the special tokens."""
    if (directory / FILE).is_file():
        # Not the class that the checkpoint names: finding it reads the configuration, which imports torch. That takes
        # seconds, and a fast tokenizer of any class is what the file says.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
