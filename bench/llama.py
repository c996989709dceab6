"""llama.cpp's side of bench.gguf: prefill and decode tokens/s at batch 1, as a line of JSON. For the Python of an environment with llama-cpp-python.

python bench/llama.py FILE.gguf --threads 2 --context 32 512 --tokens 128
"""

import argparse
import json
import time

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    model = llama_cpp.Llama(args.file, n_ctx=max(args.context) + args.tokens + 1, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)
    found = {}
    for context in args.context:
        model.reset()
        begun = time.perf_counter()
        model.eval([at % 2000 + 5 for at in range(context)])
        prefilled = time.perf_counter()
        for _ in range(args.tokens):
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(model.ctx), (model.n_vocab(),))
            model.eval([int(logits.argmax())])
        found[context] = {"prefill": context / (prefilled - begun), "decode": args.tokens / (time.perf_counter() - prefilled)}
    print(json.dumps({"version": llama_cpp.__version__, "rates": found}))


if __name__ == "__main__":
    main()
