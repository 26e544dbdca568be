"""Runs in an environment with vLLM: the log-probabilities that a checkpoint gives to given token ids.

usage: logprobs_vllm.py CHECKPOINT OUT.json 5 7 11 ...; writes a list, one number for each id after the first.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    checkpoint, out, ids = sys.argv[1], Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]
    model = LLM(model=checkpoint, skip_tokenizer_init=True, max_model_len=512, enforce_eager=True, dtype="bfloat16")
    options = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = model.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)[0]
    found = answer.prompt_logprobs
    out.write_text(json.dumps([found[place][token].logprob for place, token in enumerate(ids) if place]))


if __name__ == "__main__":
    main()
