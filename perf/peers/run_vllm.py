"""Runs in an environment with vLLM: loads a checkpoint, then answers each line of stdin with tokens a second.

usage: run_vllm.py CHECKPOINT PROMPT TOKENS; a line is a number of requests, all asked at once.
"""

import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    checkpoint, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = LLM(model=checkpoint, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=64, enforce_eager=True,
                enable_prefix_caching=False)
    size = model.llm_engine.model_config.get_vocab_size()
    options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = [[3 + (seed * 7919 + place * 104729) % (size - 3) for place in range(prompt)] for seed in range(int(line))]
        begun = time.perf_counter()
        answers = model.generate([{"prompt_token_ids": ids} for ids in prompts], options, use_tqdm=False)
        made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        print("rate", made / (time.perf_counter() - begun), flush=True)


if __name__ == "__main__":
    main()
