"""A checkpoint's tokenizer, by whichever of its files it is read, is the one that transformers picks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.omni_prompts import FAMILIES
from tests.omni_prompts import checkpoint as omni_checkpoint
from tritone.cache import default_cache
from tritone.checkpoints import DEMO_CHECKPOINT, resolve_checkpoint
from tritone.text.tokenizer import load_tokenizer, prompt_tokenizer

TEXTS = [
    "",
    "Hello, world!  Two  spaces, 12345 and 3.14159\n\n\ttabs",
    "<|im_start|>user\nwritten out<|im_end|> <|endoftext|>",
    "안녕하세요 日本語 العربية 👩‍👩‍👧‍👦 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x ** 2  # ²",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Well?"},
]


@pytest.fixture(scope="module", params=["demo", *FAMILIES])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return resolve_checkpoint(DEMO_CHECKPOINT, default_cache())
    return Path(omni_checkpoint(request.param, tmp_path_factory.mktemp("omni"))[2])


def test_ids_specials_and_template_are_those_that_transformers_picks(directory: Path) -> None:
    ours, wanted, raw = prompt_tokenizer(directory), AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    for text in TEXTS:
        assert ours.encode(text) == wanted.encode(text) == raw.encode(text).ids
    assert ours.get_vocab() == wanted.get_vocab()
    assert (ours.eos_token_id, ours.bos_token_id) == (wanted.eos_token_id, wanted.bos_token_id)
    assert ours.all_special_ids == wanted.all_special_ids

    def chat(tokenizer: Any) -> Any:
        return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]

    assert chat(ours) == chat(wanted)


def test_it_needs_no_torch() -> None:
    """Which would cost the start of preprocess seconds."""
    code = (
        "import sys; from pathlib import Path; from tritone.stages.preprocess import PreprocessStage;"
        "from tritone.text.tokenizer import prompt_tokenizer; prompt_tokenizer(Path(sys.argv[1]));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(resolve_checkpoint(DEMO_CHECKPOINT, default_cache()))], check=True)
