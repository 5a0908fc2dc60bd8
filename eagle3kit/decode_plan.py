"""What notebook 01 measures and what follows: from a run's parameters to engines, and from their steps to r and lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import collective, cpu, dummy_target, fabric, figures, speedup, target
from eagle3kit.decode_profile import Engine, Profiled, batches, depths, settings
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.files import read_json
from eagle3kit.machine import DTYPE_BYTES
from eagle3kit.places import root

if TYPE_CHECKING:
    from eagle3kit.params import Params

# Lengths that others have served with a draft for the same target: (length, its interval, prompts, draft tokens, where from).
SERVED = {
    "smollm2-135m-instruct": (1.61, (1.49, 1.76), 32, 3, "this kit's pass on two CPU cores, chats of params/cpu.yaml (README)"),
    "kimi-k2.5": (2.278, (None, None), None, 3, "an EAGLE-3 draft for Kimi-K2.6 on 8x RTX PRO 6000, pooled (rtx6kpro)"),
}
ASSUMED = 2.0


@dataclass(frozen=True)
class Subject:
    """The model that is profiled: its folder, its config, what it is in words, and the number type it runs in."""

    folder: Path
    config: dict[str, Any]
    name: str
    dtype: str

    @property
    def geometry(self) -> dummy_target.Geometry:
        """Its shapes."""
        return dummy_target.geometry(self.config)

    def messages(self, params: "Params") -> dict[int, int]:
        """{tokens: bytes} of the all-reduces that the profiled batches send."""
        return collective.messages(batches=batches(params), draft_tokens=depths(params),
                                   hidden_size=self.geometry.hidden_size, bytes_per_number=DTYPE_BYTES[self.dtype])  # fmt: skip


def subject(params: "Params", folder: Path) -> Subject:
    """The geometry that `profile.geometry` names, written into `folder`; without one, the run's own target."""
    asked = params.profile
    if asked.geometry is None:
        if asked.geometry_layers or asked.geometry_experts:
            raise KitError("profile.geometry_layers and profile.geometry_experts cut down what profile.geometry names; name one")
        place = target.locate(params.target.model, revision=params.target.revision)
        found = read_json(place / "config.json")
        return Subject(place, found, params.target.model, params.target.dtype)
    found = dummy_target.config(asked.geometry, layers=asked.geometry_layers, experts=asked.geometry_experts, base=root())
    cut = {"layers": asked.geometry_layers, "experts": asked.geometry_experts}
    kept = [f"{count} {what}" for what, count in cut.items() if count]
    name = f"{asked.geometry}, its geometry only" + (f" ({', '.join(kept)} kept)" if kept else "")
    return Subject(dummy_target.write(folder / "target", found), found, name, params.target.dtype)


def ranks_of_collective(params: "Params") -> tuple[int, str, str]:
    """(ranks, "cpu" or "cuda", why not): ranks is 0 where there is nothing to time an all-reduce between."""
    if not params.profile.collective:
        return 0, "", "profile.collective is off"
    if cpu.is_cpu():
        return (2, "cpu", "") if len(cpu.cores()) > 1 else (0, "cpu", "one core: no second rank to reduce with")
    import torch

    count = torch.cuda.device_count()
    asked = params.server.tensor_parallel if params.server.tensor_parallel > 1 else count
    return (min(asked, count), "cuda", "") if count > 1 else (0, "cuda", "one GPU: decoding on it has no all-reduce")


def engines(params: "Params", subject: Subject, folder: Path) -> list[Engine]:
    """The engines that `profile` asks for: a plain one, one for each number of draft tokens, and on several GPUs a plain one
    without vLLM's own all-reduce. Traced is the plain one, or one of its own where `trace_tensor_parallel` asks for other ranks.
    Drafts and, where the target's heads do not split, a traced stand-in go to `folder`."""
    asked, ranks = params.profile, params.server.tensor_parallel
    usual = settings(params, ranks) | {"model": str(subject.folder), "dtype": subject.dtype}
    found, most = [], [(max(batches(params)), min(asked.contexts))] if asked.trace else []
    wanted = asked.trace_tensor_parallel or ranks
    model = dummy_target.splittable(subject.config, wanted) if asked.trace else subject.config
    same = wanted == ranks and model == subject.config
    if asked.trace and not (same and asked.step_times):
        place = subject.folder if model == subject.config else dummy_target.write(folder / "traced", model)
        found.append(Engine(name="traced", traced=most, **usual | {"model": str(place), "tensor_parallel": wanted, "points": []}))
    if not asked.step_times:
        return found
    dummy_target.refuse_uneven(subject.geometry, ranks)
    found.append(Engine(name="plain", traced=most if same else [], **usual))
    chosen = params.hidden_states.layers if asked.geometry is None else None
    layers = chosen or dummy_target.layer_ids(subject.geometry.layers)
    for depth in depths(params):
        draft = dummy_target.untrained_draft(
            folder / f"draft-{depth}", subject.folder, params.training, layer_ids=layers, draft_tokens=depth,
            draft_vocab_size=min(params.vocabulary.size, subject.geometry.vocab_size),
            trust_remote_code=params.target.trust_remote_code,
        )  # fmt: skip
        pretended = min(depth + 1.0, asked.acceptance_length or ASSUMED)
        found.append(Engine(name=f"{depth} draft tokens", draft=str(draft), draft_tokens=depth, synthetic_length=pretended,
                            **usual))  # fmt: skip
    if asked.custom_allreduce and ranks > 1 and not cpu.is_cpu():
        found.append(Engine(name="plain, NCCL only", custom_allreduce=False, **usual))
    return found


def wider(profiled: Sequence[Profiled]) -> list[Engine]:
    """Stand-ins for engines whose draft this vLLM would not run: plain steps of B (K + 1) sequences, as many tokens as a verify
    step has. The draft's own passes are not in them, so r is then a lower bound ("modelled")."""
    plain = next((p.engine for p in profiled if p.engine.baseline), None)
    failed = [p.engine for p in profiled if p.engine.draft and not p.points]
    if plain is None:
        return []
    return [replace(plain, traced=[], name=f"{engine.draft_tokens} draft tokens, as plain steps", stands_for=engine.draft_tokens,
                    points=[(batch * (engine.draft_tokens + 1), context) for batch, context in engine.points])
            for engine in failed]  # fmt: skip


def ratios(profiled: Sequence[Profiled], *, resamples: int, seed: int) -> tuple[dict[tuple[int, int, int], Figure], list[str]]:
    """r by (concurrency, context, draft tokens), and why some were refused (`speedup.step_ratio`), one sentence each."""
    found, refused = {}, []
    plain = next((p for p in profiled if p.engine.baseline), None)
    for one in profiled if plain else ():
        depth = one.engine.depth
        for point in one.points if depth else ():
            batch = point.batch // (depth + 1) if one.engine.stands_for else point.batch
            base = plain.at(batch, point.context)
            if base is None:
                continue
            pair = f"{depth} draft tokens at concurrency {batch}, context {point.context:,}"
            try:
                r = speedup.step_ratio(point.seconds, base.seconds, pair=pair, paired=plain.alternated and one.alternated,
                                       resamples=resamples, seed=seed)  # fmt: skip
            except KitError as error:
                refused.append(str(error))
                continue
            if one.engine.stands_for:
                r = replace(r, kind="modelled", source=f"{r.source}, the draft's own passes left out")
            found[batch, point.context, depth] = r
    return found, refused


def step_rows(profiled: Sequence[Profiled], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """A row a point: engine, draft tokens, batch, context, milliseconds with their interval, steps, tokens a step."""
    rows = []
    for one in profiled:
        for point in one.points:
            step = figures.mean([1000 * s for s in point.seconds], unit="ms", source="steps", resamples=resamples, seed=seed)
            rows.append({"name": one.engine.name, "draft_tokens": one.engine.depth, "batch": point.batch,
                         "context": point.context, "ms": step.value, "low": step.low, "high": step.high, "steps": step.n,
                         "tokens_per_step": point.tokens_per_step})  # fmt: skip
    return rows


def choices(profiled: Sequence[Profiled], known: Mapping[int, Figure], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """The draft tokens with most tokens a second at each batch and context (0: plain decoding is best), by goodput."""
    steps: dict[tuple[int, int], dict[int, Figure]] = {}
    for one in profiled:
        if one.engine.baseline or one.engine.draft:
            for point in one.points:
                ms = figures.mean([1000 * s for s in point.seconds], unit="ms", source="steps", resamples=resamples, seed=seed)
                steps.setdefault((point.batch, point.context), {})[one.engine.depth] = ms
    found = []
    for (batch, context), by_depth in steps.items():
        if 0 in by_depth and len(by_depth) > 1:
            best = speedup.best_draft_tokens(batch, by_depth, known)
            found.append({"at once": batch, "context": context, "best draft tokens": best.draft_tokens,
                          "beyond noise": best.beyond_noise}
                         | {f"tokens/s with {depth}": rate.value for depth, rate in best.by_depth.items()})  # fmt: skip
    return found


def lengths(params: "Params") -> dict[int, Figure]:
    """Acceptance length by draft tokens: what `profile.acceptance_length` assumes, else what was served for this target before,
    else 2. It holds for one number of draft tokens (`acceptance.draft_tokens`, or as published); for others it is modelled
    with one acceptance rate a token that gives the same (`speedup.expected_tokens`), and has no interval."""
    asked, depth, kind = params.profile, params.acceptance.draft_tokens, "modelled"
    (least, most), prompts = (None, None), None
    if asked.acceptance_length is not None:
        value, source = asked.acceptance_length, "assumed by the parameters"
    elif known := SERVED.get(asked.geometry or params.target.model):
        (value, (least, most), prompts, depth, source), kind = known, "published"
    else:
        value, source = min(ASSUMED, depth + 1.0), "assumed: none is known for this target"
    if value > depth + 1:
        raise KitError(f"profile.acceptance_length is {value}, but {depth} draft tokens (acceptance.draft_tokens) give at most "
                       f"{depth + 1} tokens a verify step")  # fmt: skip
    low, high = 0.0, 1.0
    for _ in range(60):  # the rate whose expected tokens are `value`: they grow with it
        middle = (low + high) / 2
        low, high = (middle, high) if speedup.expected_tokens(middle, depth) < value else (low, middle)
    found = {}
    for other in depths(params):
        same = other == depth
        found[other] = Figure(value=value if same else speedup.expected_tokens(low, other), unit="tokens", source=source,
                              kind=kind if same else "modelled", low=least if same else None, high=most if same else None,
                              n=prompts if same else None)  # fmt: skip
    return found


def fits(measured: collective.Measured) -> dict[str, fabric.Line]:
    """The latency + bandwidth line of each way that was timed at two sizes or more, through its medians."""
    return {way: fabric.fit([(timing.size, 1e6 * timing.median) for timing in measured.of(way)])
            for way in measured.ways if len(measured.of(way)) > 1}  # fmt: skip
