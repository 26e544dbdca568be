"""Runs in an environment with llama-cpp-python: loads a GGUF file, then answers each line of stdin with tokens a second.

usage: run_llama_cpp.py FILE PROMPT TOKENS; a line is a number of threads.
"""

import sys
import time

import llama_cpp
import numpy as np
from llama_cpp import Llama

file, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Llama(file, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
size = model.n_vocab()
print("ready", flush=True)
for line in sys.stdin:
    llama_cpp.llama_set_n_threads(model.ctx, int(line), int(line))
    model.reset()
    model.eval([3 + position * 104729 % (size - 3) for position in range(prompt)])
    begun = time.perf_counter()
    for _ in range(tokens):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(size,))
        model.eval([int(logits.argmax())])
    print("rate", tokens / (time.perf_counter() - begun), flush=True)
