"""Which bucket of decode time a kernel or an operator belongs to, by its name. First rule that matches wins.

The names are those of traces by torch.profiler: CUDA and Triton kernels on GPUs, operators (`aten::…`, `_C::…`, `vllm::…`,
`gloo:…`) on CPU. A name that no rule knows is "unknown" and is listed by whoever counts it, never hidden in another bucket.
"""

import re
from functools import lru_cache
from typing import Literal

Bucket = Literal["attention", "MoE", "dense matmul", "norm/activation", "sampling", "unknown", "copies", "all-reduce",
                 "other collectives"]  # fmt: skip

# Where kernels of several streams run at one time, it is given to the first of these: compute before copies before
# communication, so that what a collective gets is its *exposed* time, which nothing else fills.
ORDER: tuple[Bucket, ...] = ("attention", "MoE", "dense matmul", "norm/activation", "sampling", "unknown", "copies", "all-reduce",
                             "other collectives")  # fmt: skip
COLLECTIVES: frozenset[Bucket] = frozenset({"all-reduce", "other collectives"})
# An operator of these owns what it calls: a matmul inside attention is attention (CPU traces nest, GPU ones do not).
OWNERS: frozenset[Bucket] = frozenset({"attention", "MoE", "all-reduce", "other collectives"})

# Operators that only wrap an all-reduce; where the collective itself was recorded too, these are not instances of their own.
WRAPPER = re.compile(r"^(vllm::all_reduce|_?c10d(_functional)?::|record_param_comms)")
# What a collective records about itself, whichever it is: inside one it belongs to it.
NOTE = "record_param_comms"
# Frames around compiled code, recorded as if they were operators: what runs inside has spans of its own, the rest is Python.
FRAME = re.compile(r"^(Torch-Compiled Region|TorchDynamo |Pregraph bytecode|AOTDispatcher )")
# Recorded from their start to their end on another thread, so they can lie across other operators and own none of them.
ASYNCHRONOUS = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):")

_SHAPES = ("view|_unsafe_view|reshape|_reshape_alias|transpose|t|as_strided|slice|select|expand|expand_as|permute|unsqueeze|"
           "squeeze|narrow|detach|detach_|alias|unbind|split|split_with_sizes|chunk|unflatten|flatten|numel|lift_fresh|item|"
           "_local_scalar_dense|is_nonzero|resolve_conj|resolve_neg|result_type|set_|resize_|unfold|movedim|size")  # fmt: skip
_COPIES = ("copy_|_to_copy|to|type_as|clone|contiguous|cat|stack|empty|empty_like|empty_strided|new_empty|zeros|zeros_like|zero_|"
           "ones|ones_like|full|full_like|fill_|arange|scalar_tensor|tensor|pin_memory|_pin_memory|is_pinned|index|"
           "index_put_|_index_put_impl_|index_copy_|index_select|gather|scatter|scatter_|embedding|repeat|repeat_interleave|masked_fill|"
           "masked_fill_|where|roll|flip|tile|constant_pad_nd|pad|_has_compatible_shallow_copy_type")  # fmt: skip
_ARITHMETIC = ("add|sub|rsub|mul|div|pow|neg|abs|exp|log|sqrt|rsqrt|reciprocal|square|mean|sum|cumsum|max|min|maximum|minimum|"
               "amax|amin|clamp|clamp_min|clamp_max|eq|ne|lt|le|gt|ge|logical_and|logical_or|logical_not|bitwise_and|"
               "bitwise_or|bitwise_not|any|all|cos|sin|floor|ceil|round|floor_divide|remainder|isnan|isinf|outer|triu|tril|prod|"
               "addcmul|lerp|var|std|"
               "sigmoid|tanh|relu|silu|gelu|mish|softplus|glu|layer_norm|native_layer_norm|rms_norm|_fused_rms_norm")  # fmt: skip
_SAMPLING = ("argmax|argmin|softmax|_softmax|log_softmax|_log_softmax|topk|sort|argsort|multinomial|exponential_|uniform_|"
             "normal_|rand|randn|randint|random_|bernoulli_|searchsorted|nonzero|unique|scatter_add_|scatter_reduce_|"
             "bincount")  # fmt: skip
_MATMULS = ("linear|addmm|mm|bmm|baddbmm|matmul|addmv|mv|dot|einsum|_scaled_mm|_int_mm|_weight_int4pack_mm|mkldnn_linear|"
            "_addmm_activation")  # fmt: skip

_RULES: tuple[tuple[Bucket, str], ...] = (
    # A fused kernel of torch.compile is named after all that it takes part in ("triton_red_fused_add_moe_forward_rms_norm_2"),
    # yet it holds pointwise work and reductions only: attention, experts and collectives are calls of their own.
    ("norm/activation", r"^triton_(poi|red|per|for)_(?!\w*(argmax|argmin|softmax|topk|sort|multinomial|exponential|logsumexp))|"
                        r"^## Call CompiledFxGraph"),
    # NCCL's and RCCL's kernels, vLLM's custom all-reduce, FlashInfer's and TensorRT-LLM's fused ones, symmetric memory,
    # quick reduce; on CPU gloo's and vLLM's shared memory's. A device function such as warpAllReduce is none.
    ("all-reduce", r"(?<!warp)(?<!block)(?<!quad)all_?reduce|cross_device_reduce|quick_?reduce"),
    ("other collectives", r"nccl|rccl|all_?gather|reduce_?scatter|all_?to_?all|nvshmem|deep_?ep|cross_device|multimem|"
                          r"^(gloo|mpi|ucc|xccl):|^_?c10d(_functional)?::|^record_param_comms|shm_(send|recv|gather|broadcast)|"
                          r"^_C::shm_"),
    ("MoE", r"moe|experts?(?![a-z])|topk_?gating|topk_softmax|topk_sigmoid|grouped_topk|group(ed)?_gemm(?!a)|gemm_grouped|"
            r"routing(indices|main|_)|(un)?permute_?(kernel|tokens|rows)|batched_triton_kernel|_ep_(gather|scatter)|"
            r"group(ed)?_?problem|router_?gemm|write_zeros_to_output|compute_identity_kernel|kernelptrarraytma"),
    # With them what mixes tokens in another way (Mamba, gated delta rules), and Triton's decode attention (_fwd_…_stage1).
    ("attention", r"attention|attn|(?<!d)flash(?!_?infer)|fmha|mha_|mla(?![a-z])|mqa|paged|splitkv|reshape_and_cache|sdpa|"
                  r"concat_and_cache|kv_?cache|batch_?(decode|prefill)with|scaled_dot_product|rowwise_sparse|lean_reduction|"
                  r"get_scheduler_metadata|^_fwd_kernel(_alibi)?$|^_fwd_(grouped_)?kernel_stage|reduce_segments|_vllm_fa\d|"
                  r"mamba|selective_(scan|state)|causal_conv1d|gated_delta|(?<![a-z])(kda|gdn)(?![a-z])"),
    ("dense matmul", rf"gemm(?!a)|gemv|cutlass|cublas|nvjet|xmma|matmul|wgmma|splitk|marlin|machete|s16816|s884|qlinear|"
                     rf"scaled_mm|triton_tem|dot_kernel|onednn_mm|linear_(pointwise|kernel)|wna16|w4a16|w8a8|lora_(shrink|expand)|"
                     rf"(^|[_:])b?mm_(k|kernel|cpu)?$|^(aten|mkldnn|onednn|prims)::({_MATMULS})_?$|^(_C|vllm)::\w*(linear|_mm)\w*"),
    ("sampling", rf"argmax|argmin|sampl|multinomial|gumbel|top_?k|top_?p|min_?p(?![a-z])|log_?softmax|softmax|logit|penalt|"
                 rf"bitmask|rejection|radix_?sort|mergesort|bitonic|distribution_|philox|exponential_kernel|temperature|bad_words|"
                 rf"logprob|logsumexp|residual_mass|^expand_kernel|^aten::({_SAMPLING})$"),
    # Before copies: a fused kernel's name lists a cast among what it does.
    ("norm/activation", r"triton_(poi|red|per|for)_|rms_?norm|layer_?norm|fused_add|silu|gelu|swiglu|act_and_mul|rotary|rope|"
                        r"quant"),
    ("copies", rf"memcpy|memset|(?<![a-z])copy|direct_copy|catarray|fillfunctor|indexselect|index_select|vectorized_gather|"
               rf"index_elementwise|_scatter_gather|embedding|arange|swap_blocks|^aten::({_SHAPES}|{_COPIES})$|"
               rf"prepare_\w*(input|pos_|seq_)|slot_mapping|eagle_|dflash_inputs|gather_block_tables|apply_write|post_update|"
               rf"update_draft_inputs|expand_idx|shift_input|zero_kv"),
    ("norm/activation", rf"norm(?!al)|elementwise|pointwise|reduce_kernel|relu|sigmoid|tanh|cub::|devicescan|"
                        rf"^aten::({_ARITHMETIC})_?$"),
)  # fmt: skip
_COMPILED = tuple((bucket, re.compile(pattern, re.IGNORECASE)) for bucket, pattern in _RULES)


@lru_cache(maxsize=65536)
def bucket_of(name: str) -> Bucket:
    """The bucket of a kernel's or operator's name, "unknown" if no rule knows it.

    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" -> "all-reduce"; "fused_moe_kernel" -> "MoE"; "aten::addmm" -> "dense matmul".
    """
    for bucket, pattern in _COMPILED:
        if pattern.search(name):
            return bucket
    return "unknown"
