"""vLLM's CPU worker for a dense draft beside a target of latent attention (MLA: DeepSeek, Kimi). Loaded by vLLM itself, by this
module's name.

Both keep their keys in one cache, so in blocks of one size. vLLM's CPU kernel of latent attention knows blocks of 16 tokens
only (v1/attention/backends/mla/cpu_mla.py), and that of usual attention says that it wants multiples of 32, so that no engine
starts: "No common block size for 16". It has a way for 16 all the same, only slower (`vec16`, v1/attention/backends/cpu_attn.py
chooses it by the block's size). On a GPU the two have sizes in common, and nothing of this is needed.
"""

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker


class LatentWorker(CPUWorker):
    """A CPUWorker whose usual attention takes blocks of 16 tokens too."""

    def init_device(self) -> None:
        """As vLLM does, but usual attention owns up to all of the block sizes that it can work with."""
        CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
        super().init_device()
