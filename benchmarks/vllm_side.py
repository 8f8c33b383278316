"""Run vLLM in a separate environment, for the comparison with `generate` in `real_model_speed`.

Its engine runs in this process with one thread (no worker, so the CPU time of the process is complete), compiled as by
default, without prefix sharing and without detokenization. CPU seconds cover all threads and finished child processes;
no child runs during generation. Compilation and one repetition come first.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output has the answer
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: str, dtype: str, prompt: int, new: int, counts: Sequence[int], repeats: int) -> None:
    """Print the version, and for each count the CPU and wall seconds of each repetition.

    :param prompt: random tokens of each prompt.
    :param new: tokens generated for each.
    """
    os.environ.update(_ENVIRONMENT)  # before vLLM reads it
    import vllm

    engine = vllm.LLM(
        folder,
        dtype=dtype,
        max_model_len=prompt + new,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(counts) * (prompt + new),  # every prompt in one forward pass
        kv_cache_memory_bytes=1 << 30,  # otherwise most of the machine's memory
        enable_prefix_caching=False,
    )
    vocab = engine.llm_engine.model_config.get_vocab_size()
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)

    def once(count: int) -> tuple[float, float]:
        prompts = [{"prompt_token_ids": random.choices(range(3, vocab), k=prompt)} for _ in range(count)]
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = sum(os.times()[:4]) - cpu, time.perf_counter() - wall
        if any(len(output.outputs[0].token_ids) != new for output in outputs):
            raise RuntimeError(f"vLLM did not generate {new} tokens for every prompt")
        return seconds

    once(counts[0])
    seconds = {count: [once(count) for _ in range(repeats)] for count in counts}
    print(json.dumps({"version": vllm.__version__, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
