"""Figures of decode time: each one is a picture whose sentence holds its numbers; where there is nothing, that is said."""


from eagle3kit import canvas, fabric, plots_decode, story
from eagle3kit.collective import Measured, Timing

FIGURES = plots_decode  # whose figures `drawn` listens to


def test_all_reduce_times(drawn):
    timings = [Timing(way, size, [[1e-6 * micro] * 4] * 2) for way, micros in (("NCCL", (20, 30)), ("vLLM custom", (4, 40)))
               for size, micro in zip((2048, 524_288), micros, strict=True)]  # fmt: skip
    fit = fabric.fit([(2048, 20), (524_288, 30)])
    plots_decode.all_reduce_times(Measured(timings, {}, {}), {"NCCL": fit})
    assert drawn == ["Median time of one all-reduce: NCCL 20.0 µs at 2 KiB, 30.0 µs at 512 KiB and vLLM custom 4.00 µs at 2 KiB, "
                     "40.0 µs at 512 KiB."]  # fmt: skip


def test_where_time_goes_and_what_a_step_takes(drawn):
    rows = [{"name": "rank 0", "shares": {"all-reduce": 0.38, "dense matmul": 0.5, "MoE": 0.0, "idle": 0.12}},
            {"name": "rank 1", "shares": {"all-reduce": 0.10, "dense matmul": 0.6, "MoE": 0.0, "idle": 0.3}}]  # fmt: skip
    plots_decode.where_time_goes(rows)
    assert "rank 0: all-reduce 38.0\u00a0%, dense matmul 50.0\u00a0%, idle 12.0\u00a0%; rank 1: all-reduce 10.0" in drawn[0]
    assert "MoE" not in drawn[0], "a bucket that nothing fell into is no part of the picture"
    many = {f"bucket {number}": 0.1 for number in range(10)}  # more than there are colours
    plots_decode.where_time_goes([{"name": "rank 0", "shares": many}])
    plots_decode.step_times([{"name": name, "batch": batch, "ms": ms, "low": 0.9 * ms, "high": 1.1 * ms}
                             for name, batch, ms in (("plain", 1, 3.5), ("plain", 16, 3.8), ("drafted", 1, 5.0))])  # fmt: skip
    assert drawn[2] == "Time of one step by sequences at once. plain: 3.50 ms at 1, 3.80 ms at 16; drafted: 5.00 ms at 1."


def test_the_map_names_what_pays(drawn):
    plots_decode.speedups(story.answer())
    assert drawn[0].startswith("GO BELOW. Speedup (published) by concurrency and context: 1.29 at 1 and 0 (pays)")
    assert "0.68 at 128 and 32,768 (does not pay)" in drawn[0]


def test_nothing_measured_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(plots_decode, "say", said.append)
    plots_decode.all_reduce_times(Measured([], {"all-reduce": "one GPU"}, {}), {})
    plots_decode.where_time_goes([])
    plots_decode.step_times([])
    plots_decode.speedups(None)
    assert len(said) == 4 and all("No " in text for text in said) and canvas.say is not plots_decode.say
