"""vLLM's CPU worker with its own all-reduce switched off: the other side of an A/B on a machine without GPUs.

Ranks of one machine reduce through shared memory; told that they do not share any, they fall back to torch.distributed, which is
gloo there (vllm/distributed/device_communicators/cpu_communicator.py). vLLM has a switch for its GPU workers only
(`disable_custom_all_reduce`), and starts workers by the name of their class.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker


class GlooWorker(CPUWorker):
    """A CPUWorker whose tensor-parallel group reduces by gloo."""

    def init_device(self) -> None:
        """As vLLM does, but every group finds that its ranks share no memory."""
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
        super().init_device()
