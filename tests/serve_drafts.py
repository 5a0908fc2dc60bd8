"""Run as a script: real vLLM, one engine after another in one process, each with another draft; what each counted, as JSON.

vLLM's import is half of a server's start on two cores, and here it is paid once. Nothing of the engine is replaced.
"""

import gc
import json
import os
import sys
from pathlib import Path


def main(task: Path) -> None:
    """`task` holds target, drafts {name: folder}, depth, prompts [token ids], new_tokens [of each]; written beside it as
    TASK.served: {name: {"drafts", "accepted" [K], "answers", "steps"}}."""
    from eagle3kit import cpu

    asked = json.loads(task.read_text())
    os.environ |= cpu.vllm_environment(threads=1, kv_cache_gib=1)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    wanted = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in asked["new_tokens"]]
    served = {}
    for name, folder in asked["drafts"].items():
        how = {"method": "eagle3", "model": folder, "num_speculative_tokens": asked["depth"]}
        engine = LLM(model=asked["target"], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=16,
                     max_num_batched_tokens=256, speculative_config=how, enable_prefix_caching=False, disable_log_stats=False,
                     per_request_spec_decode_metrics="detailed")  # fmt: skip
        told = [answer.outputs[0] for answer in engine.generate(prompts, wanted, use_tqdm=False)]
        counted = {metric.name: metric for metric in engine.get_metrics()}
        served[name] = {
            "drafts": counted["vllm:spec_decode_num_drafts"].value,
            "accepted": counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
            "answers": [list(one.token_ids) for one in told],
            "steps": [one.spec_decode_metrics.per_step_accepted for one in told],
        }  # fmt: skip
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
    task.with_suffix(".served").write_text(json.dumps(served))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
