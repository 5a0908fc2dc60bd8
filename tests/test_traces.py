"""Traces: of real processes, of made-up ones with known answers, against a timeline painted instant by instant; bad files."""

import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from eagle3kit import decode_rows, lanes, traces
from eagle3kit.buckets import ASYNCHRONOUS, COLLECTIVES, ORDER, OWNERS, bucket_of
from eagle3kit.decode_profile import Engine, Profiled, Trace
from eagle3kit.errors import KitError
from eagle3kit.trace_file import CATEGORIES, read

CASES = Path(__file__).parent / "cases"
NAMES = {"attention": "flash_fwd_splitkv_kernel", "MoE": "fused_moe_kernel", "dense matmul": "nvjet_tst_64x8_h_bz",
         "norm/activation": "rms_norm_kernel", "sampling": "ArgMaxOps", "unknown": "mystery", "copies": "Memcpy DtoD",
         "all-reduce": "cross_device_reduce_1stage", "other collectives": "ncclDevKernel_AllGather_RING_LL"}  # fmt: skip


def span(name: str, start: float, duration: float, *, category: str = "kernel", pid=0, tid=7, **args) -> dict:
    """A span as torch.profiler writes it; microseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration, "args": args}


def write(path: Path, events: list[dict], *, rank: int | None = 0, world: int = 2, indent: int | None = 1, **around) -> Path:
    """A trace file around `events`, with what torch.profiler puts beside them."""
    ranks = {} if rank is None else {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world}}
    whole = {"schemaVersion": 1, **ranks, "traceEvents": events, "traceName": str(path), "displayTimeUnit": "ms", **around}
    text = json.dumps(whole, indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def profiled(path: Path, events: list[dict], annotation: str | None = None, **how) -> traces.RankProfile:
    trace = read(write(path, events, **how))
    return traces.profile(trace, traces.window(trace, annotation))


def exposed(found: traces.RankProfile) -> dict[str, float]:
    """Exposed µs of the buckets that have any."""
    return {name: round(time.exposed_ms * 1000, 6) for name, time in found.buckets.items() if time.exposed_ms}


# ---- Real traces


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> list[Path]:
    """One trace for each of two processes that multiply and all-reduce over gloo; rank 1 comes late."""
    folder = tmp_path_factory.mktemp("real")
    script = Path(__file__).parent / "tworanks.py"
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(folder.glob("rank*.json*"))


def test_real_ranks_are_taken_apart(real):
    profiles, comparison = traces.profile_ranks(real, "^one step$")
    assert [one.rank for one in profiles] == [0, 1] and comparison.whole
    for one in profiles:
        assert one.device == "cpu" and one.steps == 5 and one.unaccounted < 0.01
        assert sum(time.exposed_ms for time in one.buckets.values()) + one.idle_ms == pytest.approx(one.wall_ms, rel=0.01)
        assert one.buckets["dense matmul"].exposed_ms > 0 and one.buckets["all-reduce"].count
        assert not one.unknown, "every operator of this trace is known"
    # Two in each step; rank 1 sleeps 20 ms before each second one, so rank 0 waits that long for it.
    assert comparison.instances == 10
    early, late = np.median(comparison.waiting_us[:, 1::2], axis=1)
    assert early > 15_000 and late < early / 2
    assert comparison.waiting_ms > 40 and comparison.transfer_ms < comparison.all_reduce_ms[0]


def test_real_kernels_of_two_gpus():
    """Two H200s, torch 2.11, NCCL: six replays of a CUDA graph of eight all-reduces, rank 1 kept late by a kernel that spins."""
    files = [CASES / f"nccl_rank{rank}.json.gz" for rank in (1, 0)]
    profiles, comparison = traces.profile_ranks(files, traces.DECODE_STEP)
    assert comparison.ranks == (0, 1) and comparison.steps == 5 and comparison.instances == 40 and comparison.straggler == 1
    assert np.median(comparison.transfer_us) == pytest.approx(6.6, abs=0.5)
    assert comparison.waiting_us[0].max() > 200_000 and np.median(comparison.waiting_us) < 1  # it waits once a profile
    _, later = traces.profile_ranks(files, traces.DECODE_STEP, skip=1)
    assert later.steps == 4 and later.instances == 32 and 100 < later.waiting_us[0].max() < 300
    with pytest.raises(KitError, match="6 steps are annotated .* all of which are to be skipped"):
        traces.profile_ranks(files, traces.DECODE_STEP, skip=6)
    for one in profiles:
        assert one.device == "gpu" and one.unaccounted < 1e-9
        counts = {name: time.count for name, time in one.buckets.items()}
        assert counts == {"attention": 40, "MoE": 0, "dense matmul": 40, "norm/activation": 40, "sampling": 10, "copies": 10,
                          "all-reduce": 40, "other collectives": 0, "unknown": 5 * one.rank}  # fmt: skip
        assert [kernel.name for kernel in one.unknown] == ["at::cuda::(anonymous namespace)::spin_kernel(long)"] * one.rank


def test_real_files_read_as_any_json_reader_reads_them(real):
    for path in real:
        raw = path.read_bytes()
        whole = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        same_as_json(read(path, piece=1000), whole)
        same_as_json(read(path), whole)


def same_as_json(trace, whole: dict) -> None:
    kept = [event for event in whole["traceEvents"] if event["ph"] == "X" and event.get("cat") in CATEGORIES]
    what = ((CATEGORIES[c], trace.names[n], tuple(trace.lanes[k])) for c, n, k in
            zip(trace.category, trace.name, trace.lane, strict=True))  # fmt: skip
    rows = [(*one, *when) for one, when in zip(what, zip(trace.start.tolist(), trace.end.tolist(), strict=True), strict=True)]
    start = [round(event["ts"] * 1000) for event in kept]
    assert rows == [(event["cat"], event["name"], (event["pid"], event["tid"]), at, at + round(event["dur"] * 1000))
                    for event, at in zip(kept, start, strict=True)]  # fmt: skip
    others = Counter(event.get("cat") or f"ph {event['ph']}" for event in whole["traceEvents"]
                     if event["ph"] != "X" or event.get("cat") not in CATEGORIES)  # fmt: skip
    assert trace.ignored == dict(others) and len(rows) + sum(others.values()) == len(whole["traceEvents"])


# ---- Reading


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 1 << 20])
def test_any_text_in_names_and_any_piece(tmp_path, indent, piece):
    rng, letters = random.Random(piece), '"\\{}[],: \n\u00e9\u2713/abc'
    events = []
    for number in range(40):
        name = "".join(rng.choice(letters) for _ in range(rng.randint(0, 30)))
        event = span(name, number * 10.125, rng.randint(0, 9000) / 1000, category=rng.choice([*CATEGORIES, "python_function"]),
                     pid=rng.choice([1, "Spans"]), tid=rng.choice([2, "python " + name]))  # fmt: skip
        event["args"] = {name: [{"deep": [name, {}]}, []], "External id": number}
        events.append(event)
        events.append({"ph": "s", "id": number, "pid": 1, "tid": 2, "ts": 1, "cat": "ac2g", "name": name})
        events.append({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": name}})
    path = write(tmp_path / "t.json", events, indent=indent, deviceProperties=[{"name": '"traceEvents\\" : ['}])
    same_as_json(read(path, piece=piece), json.loads(path.read_text()))


def test_times_are_exact_to_the_nanosecond(tmp_path):
    # Traces of older versions count microseconds from 1970: a double would be a quarter of one off.
    one = '{"ph": "X", "cat": "kernel", "name": "a", "pid": 0, "tid": 7, "ts": 1764451234567890.123, "dur": 1.001}'
    two = '{"ph": "X", "cat": "kernel", "name": "b", "pid": 0, "tid": 7, "ts": 1764451234567891.124, "dur": 2}'
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{one}, {two}]}}')
    trace = read(tmp_path / "t.json")
    assert trace.start.tolist() == [1764451234567890123, 1764451234567891124]
    assert trace.end.tolist() == [1764451234567891124, 1764451234567893124]
    assert trace.rank is None


@pytest.mark.parametrize("since", [0, 10**3, 5 * 10**12, 2**43 - 1, 2**43, 1764451234567890])
def test_times_are_exact_wherever_the_clock_starts(tmp_path, since):
    whole = [since * 1000 + n for n in range(0, 5000, 7)]
    each = (f'{{"ph": "X", "cat": "kernel", "name": "a", "ts": {n // 1000}.{n % 1000:03}, "dur": {n % 7}.{n % 1000:03}}}'
            for n in whole)  # fmt: skip
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{", ".join(each)}]}}')
    trace = read(tmp_path / "t.json")
    assert trace.start.tolist() == whole and (trace.end - trace.start).tolist() == [n % 7 * 1000 + n % 1000 for n in whole]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_cut_off_anywhere_is_refused_with_the_place(tmp_path, suffix):
    events = [span("gemm", number, 0.5, grid=[1, 2], note='a "quoted" } ] , thing') for number in range(12)]
    whole = write(tmp_path / f"whole{suffix}", events).read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for kept in range(0, len(whole) - 1, 3 if suffix == ".json.gz" else 41):
        cut.write_bytes(whole[:kept])
        with pytest.raises(KitError) as refused:
            read(cut, piece=512)
        assert str(cut) in str(refused.value)
    middle = len(whole) // 2
    cut.write_bytes(whole[:middle])
    with pytest.raises(KitError, match=r"cut off" if suffix == ".json.gz" else rf"cut off.*byte {middle:,} within traceEvents"):
        read(cut)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trace by torch.profiler"),
        ("not JSON", "begin with b'not JSON'"),
        ('[{"ph": "X"}]', "no trace by torch.profiler"),
        ('{"a": 1}', "no traceEvents in its first 8 bytes"),
        ('{"a": {"traceEvents": []}}', "no trace by torch.profiler"),
        ('{"traceEvents": []}', "0 events, but no kernel"),
        ('{"traceEvents": [{"ph": "M", "name": "x"}]}', "1 events, but no kernel"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 5}]}', "not as torch.profiler writes it.*str.*int"),
        ('{"traceEvents": [{"ph": "X",, }]}', "between bytes 17 and 31 .after 0 good events"),
        ('{"traceEvents": [1, 2]}', "not as torch.profiler writes it"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]}', "'k' at 1.0 µs has no duration"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}', "has the duration -1"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1}]} extra', "wrong"),
    ],
)
def test_foreign_files_are_refused(tmp_path, text, message):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(KitError, match=message):
        read(path)


def test_no_file_and_damaged_gzip(tmp_path):
    with pytest.raises(KitError, match="no such trace"):
        read(tmp_path / "none.json")
    path = write(tmp_path / "t.json.gz", [span("gemm", 0, 1)] * 2000)
    bytes_ = bytearray(path.read_bytes())
    bytes_[len(bytes_) // 2] ^= 0xFF
    path.write_bytes(bytes_)
    with pytest.raises(KitError, match="damaged or cut off|not as torch.profiler"):
        read(path)


# ---- Buckets


@pytest.mark.parametrize(("bucket", "name"), NAMES.items())
def test_names_of_this_test(bucket, name):
    assert bucket_of(name) == bucket


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("ncclSymkDevKernel_AllReduce_AGxLLMC_R_sum_bf16", "all-reduce"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 2>(vllm::RankData*)", "all-reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<…>", "all-reduce"),
        ("multimem_all_reduce_kernel", "all-reduce"),
        ("two_shot_all_reduce_kernel_inplace", "all-reduce"),
        ("quickreduce::allreduce_prototype_twoshot", "all-reduce"),
        ("gloo:all_reduce", "all-reduce"),
        ("c10d::allreduce_", "all-reduce"),
        ("vllm::all_reduce", "all-reduce"),
        ("_C::shm_allreduce", "all-reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "other collectives"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "other collectives"),
        ("c10d::_allgather_base_", "other collectives"),
        ("record_param_comms", "other collectives"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<…>>>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<…>", "attention"),
        ("_C::cpu_attention_with_kv_cache", "attention"),
        ("BatchDecodeWithPagedKVCacheKernel", "attention"),
        ("fused_moe_kernel", "MoE"),
        ("void vllm::moe::topkGatingSoftmax<…>", "MoE"),
        ("vllm::moe_forward_shared", "MoE"),
        ("void marlin_moe_wna16::Marlin<…>", "MoE"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "dense matmul"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "dense matmul"),
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_tn", "dense matmul"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, …>", "dense matmul"),
        ("aten::addmm", "dense matmul"),
        ("mkldnn::_linear_pointwise", "dense matmul"),
        ("_C::onednn_mm", "dense matmul"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "norm/activation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm/activation"),
        ("void vllm::act_and_mul_kernel<…>", "norm/activation"),
        ("_C::rotary_embedding", "norm/activation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>", "norm/activation"),
        ("aten::add_", "norm/activation"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, …>>", "sampling"),
        ("aten::argmax", "sampling"),
        ("void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<…>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda…>>",
         "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<…>", "copies"),
        ("aten::copy_", "copies"),
        ("aten::view", "copies"),
        ("aten::embedding", "copies"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("vllm::unified_mla_attention_with_output", "attention"),
        ("_fwd_kernel_ep_scatter_1", "MoE"),
        ("_gemma_rmsnorm_kernel", "norm/activation"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norm/activation"),
        ("vllm::flashinfer_fp8_blockscale_gemm", "dense matmul"),
        ("_C::bmm_cpu", "dense matmul"),
        ("rejection_greedy_sample_kernel", "sampling"),
        ("_temperature_kernel", "sampling"),
        ("eagle_prepare_inputs_padded_kernel", "copies"),
        ("triton_red_fused_add_moe_forward_shared_rms_norm_2", "norm/activation"),
        ("triton_poi_fused_all_reduce_unified_attention_mul_silu_1", "norm/activation"),
        ("triton_per_fused_argmax_3", "sampling"),
        ("## Call CompiledFxGraph fd2t2djtxp3x ##", "norm/activation"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*)", "MoE"),
        ("void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*, int*)", "MoE"),
        ("void vllm::moe::grouped_topk_fused_kernel<float, __nv_bfloat16, int>(…)", "MoE"),
        ("void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(…)", "MoE"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<…>, …>>", "MoE"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, …>>", "dense matmul"),
        ("void dsv3_router_gemm_kernel<__nv_bfloat16, 128, 8, 384, 7168>(…)", "MoE"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<…>", "dense matmul"),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 4>>(…)", "attention"),
        ("void sm90::flash_fwd_mla_combine_kernel<…>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<…>>", "attention"),
        ("flash::prepare_varlen_num_blocks_kernel(…)", "attention"),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, …>", "attention"),
        ("void vllm::merge_attn_states_kernel<…>", "attention"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, …>", "dense matmul"),
        ("brand_new_kernel", "unknown"),
        ("warpAllReduceProbe", "unknown"),
    ],
)  # fmt: skip
def test_names_as_traces_show_them(name, bucket):
    assert bucket_of(name) == bucket


def test_unknown_kernels_are_listed_with_their_time(tmp_path):
    found = profiled(tmp_path / "t.json", [span("mystery", 0, 3), span("mystery", 5, 4), span("odd", 10, 1), span("gemm", 12, 1)])
    listed = [(kernel.name, kernel.count, round(kernel.ms, 6)) for kernel in found.unknown]
    assert listed == [("mystery", 2, 0.007), ("odd", 1, 0.001)]
    assert found.buckets["unknown"].exposed_ms == pytest.approx(0.008)
    assert {kernel.name for kernel in found.kernels} == {"mystery", "odd", "gemm"}


# ---- Known answers


def test_streams_that_overlap_give_each_instant_once(tmp_path):
    # A GEMM from 0 to 10 hides most of an all-reduce from 4 to 14; a copy from 12 to 16 on a third stream comes before it.
    found = profiled(tmp_path / "t.json", [span(NAMES["dense matmul"], 0, 10), span(NAMES["all-reduce"], 4, 10, tid=8),
                                           span(NAMES["copies"], 12, 4, tid=9, category="gpu_memcpy"),
                                           span(NAMES["attention"], 20, 5)])  # fmt: skip
    assert exposed(found) == {"dense matmul": 10, "all-reduce": 2, "copies": 4, "attention": 5}
    assert found.buckets["all-reduce"].total_ms == pytest.approx(0.010)
    assert found.wall_ms == pytest.approx(0.025) and found.idle_ms == pytest.approx(0.004) and found.device == "gpu"
    assert found.all_reduce_us.tolist() == [10.0]


def test_nested_operators_give_time_to_the_innermost(tmp_path):
    def op(name, start, duration):
        return span(name, start, duration, category="cpu_op")

    found = profiled(tmp_path / "t.json", [
        op("aten::linear", 0, 10), op("aten::t", 1, 2), op("aten::addmm", 3, 6),  # 1 + 1 of its own, 2, 6
        op("vllm::unified_attention_with_output", 20, 10), op("aten::bmm", 21, 3), op("aten::softmax", 25, 2),
        op("gloo:all_reduce", 27, 1),  # a collective stays one, whoever calls it
        op("mystery", 40, 5), op("aten::add", 41, 1),
        span("step", 0, 50, category="user_annotation"), span("f.py(1): run", 0, 50, category="python_function"),
    ])  # fmt: skip
    assert exposed(found) == {"dense matmul": 8, "copies": 2, "attention": 9, "all-reduce": 1, "unknown": 4, "norm/activation": 1}
    assert found.device == "cpu" and found.ignored == {"python_function": 1}
    assert found.idle_ms == pytest.approx(0.020)  # 10 to 20 and 30 to 40; it ends with the last operator, at 45
    assert found.wall_ms == pytest.approx(0.045)


def test_frames_around_compiled_code_are_python_and_what_they_hold_is_not(tmp_path):
    def op(name, start, duration):
        return span(name, start, duration, category="cpu_op")

    found = profiled(tmp_path / "t.json", [
        op("aten::add", 0, 1), op("TorchDynamo Cache Lookup", 2, 3), op("Torch-Compiled Region: 0/0", 5, 10),
        op("## Call CompiledFxGraph abc ##", 6, 6), op("aten::mm", 7, 2), op("aten::add", 19, 1),
    ])  # fmt: skip
    assert exposed(found) == {"norm/activation": 6, "dense matmul": 2} and not found.unknown
    assert found.wall_ms == pytest.approx(0.020) and found.idle_ms == pytest.approx(0.012)


def test_an_asynchronous_collective_owns_nothing(tmp_path):
    # gloo's span begins inside its operator and ends long after it, while the thread goes on to compute.
    found = profiled(tmp_path / "t.json", [
        span("c10d::allreduce_", 0, 2, category="cpu_op"), span("gloo:all_reduce", 1, 19, category="user_annotation"),
        span("aten::mm", 5, 6, category="cpu_op"),
    ])  # fmt: skip
    assert exposed(found) == {"all-reduce": 14, "dense matmul": 6} and found.idle_ms == 0
    assert found.all_reduce_us.tolist() == [19.0]  # one instance: the operator only wraps it


def test_wrappers_are_instances_where_nothing_inside_was_recorded(tmp_path):
    found = profiled(tmp_path / "t.json", [
        span("vllm::all_reduce", 0, 10, category="cpu_op"), span("c10d::allreduce_", 1, 8, category="cpu_op"),
        span("vllm::all_reduce", 20, 5, category="cpu_op"), span("record_param_comms", 21, 1, category="cpu_op"),
    ])  # fmt: skip
    assert found.all_reduce_us.tolist() == [10.0, 5.0]
    assert exposed(found) == {"all-reduce": 15}


def ranks_of(tmp_path: Path, *durations: tuple[float, ...], **how) -> list[Path]:
    """A trace a rank: a GEMM before each all-reduce of the given durations, which end together."""
    paths, ends = [], [100.0 * (i + 1) for i in range(len(durations[0]))]
    for rank, mine in enumerate(durations):
        events = []
        for end, long in zip(ends, mine, strict=False):
            events += [span(NAMES["dense matmul"], end - 90, 90 - long), span(NAMES["all-reduce"], end - long, long)]
        paths.append(write(tmp_path / f"rank{rank}.json", events, rank=rank, world=how.get("world", len(durations))))
    return paths


def test_a_straggler_makes_the_others_wait(tmp_path):
    profiles, found = traces.profile_ranks(ranks_of(tmp_path, (40, 30, 20), (4, 3, 6), (14, 3, 26))[::-1])
    assert found.ranks == (0, 1, 2) and found.straggler == 1 and found.instances == 3 and found.whole
    assert found.transfer_us.tolist() == [4, 3, 6]
    assert found.waiting_us.tolist() == [[36, 27, 14], [0, 0, 0], [10, 0, 20]]
    assert found.transfer_ms == pytest.approx(0.013) and found.waiting_ms == pytest.approx((77 + 0 + 30) / 3 / 1000)
    assert found.all_reduce_ms == pytest.approx((0.09, 0.013, 0.043))
    assert [one.all_reduce_ms for one in profiles] == pytest.approx(found.all_reduce_ms)


def test_one_rank_cannot_tell_waiting(tmp_path):
    (one, _) = ranks_of(tmp_path, (40, 30), (4, 3))
    _, found = traces.profile_ranks([one])
    assert found.transfer_ms is None and found.waiting_ms is None and found.straggler is None and not found.whole
    assert found.all_reduce_ms == pytest.approx((0.07,))


def test_no_all_reduce_at_all(tmp_path):
    paths = [write(tmp_path / f"{rank}.json", [span("gemm", 0, 5), span("gemm", 6, 2)], rank=rank) for rank in range(2)]
    profiles, found = traces.profile_ranks(paths)
    assert found.instances == 0 and found.transfer_ms == 0 and found.straggler is None
    assert profiles[0].buckets["all-reduce"] == traces.BucketTime(0, 0, 0) and profiles[0].idle_ms == pytest.approx(0.001)


def test_ranks_that_do_not_fit_together_are_refused(tmp_path):
    first, second = ranks_of(tmp_path, (40, 30), (4,))
    with pytest.raises(KitError, match=r"same all-reduces \(rank0.json: 2, rank1.json: 1\)"):
        traces.profile_ranks([first, second])
    with pytest.raises(KitError, match=r"different ranks.*\[0, 0\]"):
        traces.profile_ranks([first, first])
    with pytest.raises(KitError, match="different ranks"):
        traces.compare([])


def test_kernels_of_two_gpus_in_one_trace_are_refused(tmp_path):
    with pytest.raises(KitError, match="GPUs 0, 1"):
        profiled(tmp_path / "t.json", [span("gemm", 0, 1, pid=0), span("gemm", 2, 1, pid=1)])


# ---- Windows


def annotated(category: str = "gpu_user_annotation", **how) -> list[dict]:
    """Five steps of 10 µs, 8 of them busy: prefill, then four of decode."""
    events = []
    for step, name in enumerate(["execute_context_8(99)_generation_0(0)"] + ["execute_context_0(0)_generation_8(8)"] * 4):
        at = step * 10
        events += [span(name, at, 8, category=category, **how), span("gemm", at, 5), span("rms_norm", at + 5, 3)]
    return events


@pytest.mark.parametrize("category", ["gpu_user_annotation", "user_annotation"])
def test_decode_steps_are_counted_from_start_to_start(tmp_path, category):
    found = profiled(tmp_path / "t.json", annotated(category), traces.DECODE_STEP)
    assert found.steps == 3 and found.wall_ms == pytest.approx(0.030) and found.step_ms == pytest.approx(0.010)
    assert exposed(found) == {"dense matmul": 15, "norm/activation": 9} and found.idle_ms == pytest.approx(0.006)
    assert found.buckets["dense matmul"].count == 3


def test_a_stream_that_repeats_an_annotation_and_one_inside_another_are_no_steps(tmp_path):
    name, category = "execute_context_0(0)_generation_8(8)", "gpu_user_annotation"
    others = [span(name, step * 10 + 8.5, 1, category=category, tid=20) for step in (1, 2)]
    inner = [span(name, step * 10 + 1, 1, category=category) for step in (1, 2, 3, 4)]
    assert profiled(tmp_path / "t.json", annotated() + others + inner, traces.DECODE_STEP).steps == 3


def test_a_single_step_is_its_own_window_and_spans_across_its_edge_are_clipped(tmp_path):
    events = [span("gemm", 0, 10), span("rms_norm", 12, 10), span("one", 4, 10, category="user_annotation")]
    found = profiled(tmp_path / "t.json", events, "^one$")
    assert found.steps == 1 and found.idle_ms == pytest.approx(0.002)
    assert exposed(found) == {"dense matmul": 6, "norm/activation": 2}
    assert found.buckets["dense matmul"].count == 0 and found.buckets["norm/activation"].count == 1


def test_windows_that_hold_nothing_are_refused(tmp_path):
    path = write(tmp_path / "t.json", annotated("user_annotation"))
    with pytest.raises(KitError, match=r"'ProfilerStep'; there is execute_context_0\(0\)_generation_8\(8\), execute_context_8"):
        traces.window(read(path), "ProfilerStep")
    with pytest.raises(KitError, match="no annotation at all"):
        traces.window(read(write(tmp_path / "u.json", [span("gemm", 0, 1)])), "step")
    with pytest.raises(KitError, match="no kernel or operator ran in the 0.010 ms"):
        traces.profile(read(path), traces.Window(10**9, 10**9 + 10_000, 1))
    with pytest.raises(KitError, match="annotations only"):
        traces.window(read(write(tmp_path / "v.json", [span("step", 0, 1, category="user_annotation")])))


def test_windows_of_an_engine_leave_out_the_first_step_and_hide_no_odd_rank(tmp_path):
    def asked(steps: int, *ranks: list[dict]) -> decode_rows.Windows:
        files = [write(tmp_path / f"{steps} {rank}.json", events, rank=rank) for rank, events in enumerate(ranks)]
        return decode_rows.windows([Profiled(Engine(name="e", model="m", points=[]), traces=[Trace(8, 16, steps, files)])])

    [(profiles, whole)] = asked(4, annotated(), annotated())
    assert [p.steps for p in profiles] == [2, 2] and whole.ranks == (0, 1) and whole.remark == ""
    assert [p.steps for p in asked(2, annotated())[0][0]] == [3], "of two steps none can be spared"
    apart = asked(3, annotated(), annotated()[:-3])
    assert [(c.ranks, c.steps, c.transfer_ms) for _, c in apart] == [((0,), 2, None), ((1,), 1, None)]
    assert all("did not see the same steps (3 0.json: 2, 3 1.json: 1)" in c.remark for _, c in apart)
    table = decode_rows.traced(apart)
    assert table["rank"].tolist() == [0, 1] and table["transfer, ms"].isna().all() and "same steps" in table["remark"][1]
    renamed = [event | {"name": event["name"].replace("execute_context", "run")} for event in annotated()]
    [(profiles, other)] = asked(5, renamed, renamed)
    assert profiles[0].steps is None and other.remark.startswith("the whole trace, start and end of it included: ")
    assert "no step is annotated" in other.remark and "run_0(0)_generation_8(8)" in other.remark


# ---- Against a timeline painted instant by instant


def painted(events: list[dict], length: int, nested: bool) -> tuple[Counter, int]:
    """The definition, done naively: (instants of each bucket, idle instants) of 1 µs events over [0, length)."""
    times, idle = Counter(), 0
    events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    for now in range(length):
        running: dict[int, list[dict]] = {}
        for event in events:
            if event["ts"] <= now < event["ts"] + event["dur"]:
                running.setdefault(event["tid"], []).append(event)
        buckets = []
        for stack in running.values():  # in order of their start: the last one is innermost
            bucket = owner = None
            for event in stack:
                bucket = bucket_of(event["name"])
                if nested and owner and (bucket not in COLLECTIVES or event["name"] == "record_param_comms"):
                    bucket = owner
                elif nested and bucket in OWNERS and not ASYNCHRONOUS.match(event["name"]):
                    owner = bucket
            buckets.append(bucket)
        if buckets:
            times[min(buckets, key=ORDER.index)] += 1
        else:
            idle += 1
    return times, idle


@pytest.mark.parametrize("seed", range(25))
def test_random_streams_as_painted(tmp_path, seed):
    rng = random.Random(seed)
    names = list(NAMES.values())
    events = [span(rng.choice(names), rng.randrange(120), rng.randint(0, 12), tid=rng.randrange(4)) for _ in range(40)]
    events += [span("gemm", 0, 1), span("gemm", 139, 1)]
    found = profiled(tmp_path / "t.json", events)
    times, idle = painted(events, 140, nested=False)
    assert exposed(found) == dict(times) and found.idle_ms * 1000 == pytest.approx(idle)
    assert found.unaccounted == pytest.approx(0, abs=1e-9)


def nest(rng: random.Random, start: int, end: int, depth: int) -> list[dict]:
    """Properly nested operators within [start, end)."""
    made, at = [], start
    while at < end:
        stop = rng.randint(at, end)
        if stop > at and rng.random() < 0.7:
            name = rng.choice([*NAMES.values(), "aten::mm", "vllm::all_reduce", "gloo:all_reduce", "record_param_comms"])
            made.append(span(name, at, stop - at, category="cpu_op", tid=depth))
            if depth:
                made += [inner | {"tid": depth} for inner in nest(rng, at, stop, depth - 1)]
        at = max(stop, at + 1)
    return made


@pytest.mark.parametrize("seed", range(25))
def test_random_nests_as_painted(tmp_path, seed):
    rng = random.Random(seed)
    edges = [span("aten::mm", at, 1, category="cpu_op") for at in (-1, 60)]
    events = [*edges, *nest(rng, 0, 60, 3), *(event | {"tid": 9} for event in nest(rng, 10, 50, 2))]
    found = profiled(tmp_path / "t.json", events)
    times, idle = painted([event | {"ts": event["ts"] + 1} for event in events], 62, nested=True)
    assert exposed(found) == dict(times) and found.idle_ms * 1000 == pytest.approx(idle)
    assert found.unaccounted == pytest.approx(0, abs=1e-9)
    assert sum(kernel.count for kernel in found.kernels) == len(events)


def test_union_of_intervals():
    found = lanes.union(np.array([2, 0, 6, 9, 20]), np.array([6, 4, 7, 9, 21]))
    assert [part.tolist() for part in found] == [[0, 20], [7, 21]] and lanes.length(found) == 8
    assert lanes.length(lanes.union(np.zeros(0, np.int64), np.zeros(0, np.int64))) == 0
