"""Tasks from texts: which documents and items, cut into tokens how."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritone.errors import bad
from tritone.evaluation.corpora import gsm8k, own_text, reference_text
from tritone.evaluation.tasks import Choice, Greedy, Likelihood, Task, Tools
from tritone.evaluation.tasks.likelihood import Document

TASKS = ("text", "gsm8k", "choice", "greedy", "tools")
WINDOW = 512
ANSWER_LENGTH = 64
_LEAST_WINDOW = 64


@dataclass(frozen=True)
class Sizes:
    """``tokens`` of running text; ``items`` of the tasks that have items."""

    tokens: int
    gsm8k: int
    choice: int
    greedy: int
    tools: int

    def changed(self, tokens: int | None, limit: int | None) -> Sizes:
        """Other ``tokens``; ``limit`` items in each task, as far as there are so many."""
        items = (limit,) * 4 if limit else (self.gsm8k, self.choice, self.greedy, self.tools)
        return Sizes(tokens or self.tokens, *items)


DEFAULT = Sizes(tokens=16384, gsm8k=64, choice=64, greedy=32, tools=24)
QUICK = Sizes(tokens=2048, gsm8k=6, choice=6, greedy=4, tools=4)


class Texts:
    """The tokenizer of ``checkpoint``, as tasks need it."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
        self.stop = [] if self._tokenizer.eos_token_id is None else [int(self._tokenizer.eos_token_id)]

    def encode(self, text: str) -> list[int]:
        """Without special tokens at the ends."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """With the chat template, or, where the checkpoint has none, line by line; an answer comes next."""
        if self._tokenizer.chat_template:
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(encoded["input_ids"])
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return self.encode("\n".join([*lines, "assistant:"]))


def build_tasks(names: list[str], texts: Texts, sizes: Sizes, seed: int, text: Path | None) -> list[Task]:
    """``text``: a file to use as running text."""
    tasks: list[Task] = []
    for name in names:
        if name == "text":
            corpus = own_text(text) if text is not None else reference_text()
            windows = _windows([texts.encode(document) for document in corpus.documents], sizes.tokens, seed)
            tasks.append(Likelihood("text", corpus.source, windows))
        elif name == "gsm8k":
            pairs = [(texts.encode(p.prompt), texts.encode(p.answer)) for p in gsm8k()[: sizes.gsm8k]]
            documents = [Document((*prompt, *answer), len(prompt)) for prompt, answer in pairs]
            tasks.append(Likelihood("gsm8k", "solutions of GSM8K's test problems, each after its question", documents))
        elif name == "choice":
            tasks.append(Choice(texts.encode, gsm8k(), sizes.choice, seed))
        elif name == "greedy":
            prompts = [texts.chat([{"role": "user", "content": p.question}]) for p in gsm8k()[: sizes.greedy]]
            tasks.append(Greedy("answers to questions of GSM8K's test problems", prompts, ANSWER_LENGTH, texts.stop))
        else:
            tasks.append(Tools(texts.chat, texts.decode, texts.stop, sizes.tools))
    return tasks


def _windows(documents: list[list[int]], tokens: int, seed: int) -> list[Document]:
    """``tokens`` tokens of the documents, in windows of at most ``WINDOW``, drawn from all of them."""
    windows = [ids[begin : begin + WINDOW] for ids in documents for begin in range(0, len(ids), WINDOW)]
    usable = [window for window in windows if len(window) >= _LEAST_WINDOW] or [w for w in windows if len(w) > 1]
    if not usable:
        raise bad("text", f"{sum(map(len, documents))} tokens", "at least 2 tokens")
    random.Random(seed).shuffle(usable)
    chosen: list[Document] = []
    left = tokens
    for window in usable:
        if left < 2:
            break
        chosen.append(Document(tuple(window[:left]), 1))
        left -= len(window)
    return chosen
