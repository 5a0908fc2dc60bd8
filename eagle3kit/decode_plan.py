"""What notebook 01 measures and what follows: from a run's parameters to engines, and from their steps to r and lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import collective, cpu, dummy_target, fabric, figures, speedup, target, target_config, whole
from eagle3kit.decode_profile import Engine, Profiled, batches, depths, settings
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.files import read_json
from eagle3kit.lengths import ASSUMED
from eagle3kit.machine import DTYPE_BYTES
from eagle3kit.places import root

if TYPE_CHECKING:
    from eagle3kit.params import Params

@dataclass(frozen=True)
class Subject:
    """The model that is profiled: its folder, its config, what it is in words, and the number type it runs in.

    `layers`: decoder layers of the whole model, of which `geometry.layers` are kept. `fewer`: the layers of a second, smaller
    cut, with which r of the whole can be told (`whole`); None where nothing was cut, or fewer than three would be left.
    """

    folder: Path
    config: dict[str, Any]
    name: str
    dtype: str
    layers: int
    fewer: int | None = None

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
        if target_config.wraps(found):
            found = dummy_target.language_model(found, place / "config.json")
            place = dummy_target.write(folder / "target", found)
        return Subject(place, found, params.target.model, params.target.dtype, dummy_target.geometry(found).layers)
    found = dummy_target.config(asked.geometry, layers=asked.geometry_layers, experts=asked.geometry_experts, base=root())
    shape, uncut = (dummy_target.geometry(one) for one in (found, dummy_target.config(asked.geometry, base=root())))
    cut = {"layers": (shape.layers, uncut.layers), "experts": (shape.experts, uncut.experts)}
    kept = [f"{count} of {of} {what}" for what, (count, of) in cut.items() if count < of]
    place = Path(asked.geometry)
    known = asked.geometry if place.parent == Path() else place.parent.name if place.name == "config.json" else place.stem
    name = f"{known}, geometry only" + (f" ({', '.join(kept)})" if kept else "")
    fewer = max(3, shape.layers // 2) if 3 < shape.layers < uncut.layers else None
    return Subject(dummy_target.write(folder / "target", found), found, name, params.target.dtype, uncut.layers, fewer)


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
    """The engines that `profile` asks for, group by group (`Engine.group`); drafts and cut targets go to `folder`.

    "": a plain one, one for each number of draft tokens, and with several ranks a plain one without vLLM's own all-reduce.
    "traced": where `trace_tensor_parallel` asks for other ranks, or heads do not split, the engine that is traced, and again the
    same without vLLM's own all-reduce. "fewer": the plain and the drafting ones with half the layers of a cut geometry (`whole`).
    """
    asked, ranks = params.profile, params.server.tensor_parallel
    usual = settings(params, ranks) | {"model": str(subject.folder), "dtype": subject.dtype}
    found, most = [], [(max(batches(params)), min(asked.contexts))] if asked.trace else []
    wanted = asked.trace_tensor_parallel or ranks
    model = dummy_target.splittable(subject.config, wanted) if asked.trace else subject.config
    same = wanted == ranks and model == subject.config
    if asked.trace and not (same and asked.step_times):
        place = subject.folder if model == subject.config else dummy_target.write(folder / "traced", model)
        switch = asked.step_times and asked.custom_allreduce and wanted > 1
        name = "traced" if model == subject.config else f"traced, {model['num_attention_heads']} heads"
        found.append(Engine(name=name, traced=most, **usual | {
            "model": str(place), "tensor_parallel": wanted, "points": most if switch else [], "group": "traced"}))  # fmt: skip
        found += [_switched(found[-1])] if switch else []
    if not asked.step_times:
        return found
    dummy_target.refuse_uneven(subject.geometry, ranks)
    plain = Engine(name="plain", traced=most if same else [], **usual)
    chosen = params.hidden_states.layers if asked.geometry is None else None
    found += [plain, *_drafting(params, subject, chosen, folder, usual)]
    found += [_switched(plain)] if asked.custom_allreduce and ranks > 1 else []
    if (few := subject.fewer) and asked.geometry:
        cut = dummy_target.config(asked.geometry, layers=few, experts=asked.geometry_experts, base=root())
        less = replace(subject, folder=dummy_target.write(folder / f"target-{few}", cut), config=cut)
        usual |= {"model": str(less.folder), "group": "fewer"}
        found += [replace(one, name=f"{one.name}, {few} layers") for one in
                  (Engine(name="plain", **usual), *_drafting(params, less, None, folder / f"{few}-layers", usual))]  # fmt: skip
    return found


def _drafting(
    params: "Params", subject: Subject, chosen: Sequence[int] | None, folder: Path, usual: Mapping[str, Any]
) -> list[Engine]:
    """An engine with an untrained draft for each number of draft tokens."""
    layers, found = chosen or dummy_target.layer_ids(subject.geometry.layers), []
    for depth in depths(params):
        draft = dummy_target.untrained_draft(
            folder / f"draft-{depth}", subject.folder, params.training, layer_ids=layers, draft_tokens=depth,
            draft_vocab_size=min(params.vocabulary.size, subject.geometry.vocab_size),
            trust_remote_code=params.target.trust_remote_code,
        )  # fmt: skip
        pretended = min(depth + 1.0, params.profile.acceptance_length or ASSUMED)
        found.append(Engine(name=f"{depth} draft token{'s' * (depth > 1)}", draft=str(draft), draft_tokens=depth,
                            synthetic_length=pretended, **usual))  # fmt: skip
    return found


def _switched(engine: Engine) -> Engine:
    """The same without vLLM's own all-reduce: the other side of an A/B."""
    return replace(engine, name=f"{engine.name}, {'gloo' if cpu.is_cpu() else 'NCCL'} only", traced=[], custom_allreduce=False)


def wider(profiled: Sequence[Profiled]) -> list[Engine]:
    """Stand-ins for engines whose draft this vLLM would not run: plain steps of B (K + 1) sequences, as many tokens as a verify
    step has. The draft's own passes are not in them and each token reads a context of its own, so r is then "modelled"."""
    plain = {p.engine.group: p.engine for p in profiled if p.engine.baseline}
    failed = [p.engine for p in profiled if p.engine.draft and not p.points and p.engine.group in plain]
    return [replace(plain[engine.group], traced=[], name=f"{engine.name}, as plain steps", stands_for=engine.draft_tokens,
                    points=[(batch * (engine.draft_tokens + 1), context) for batch, context in engine.points])
            for engine in failed]  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Seconds of steps with speculation and of plain ones, at one place. `paired`: they alternated, in the process `child`.
    `imitated`: see `wider`."""

    speculating: list[float]
    plain: list[float]
    paired: bool
    imitated: bool
    child: str = ""


def pairs(profiled: Sequence[Profiled], group: str = "") -> dict[tuple[int, int, int], Pair]:
    """What a group timed with and without speculation, by (concurrency, context, draft tokens)."""
    found, mine = {}, [p for p in profiled if p.engine.group == group]
    plain = next((p for p in mine if p.engine.baseline), None)
    for one in mine if plain else ():
        depth = one.engine.depth
        for point in one.points if depth else ():
            batch = point.batch // (depth + 1) if one.engine.stands_for else point.batch
            if base := plain.at(batch, point.context):
                found[batch, point.context, depth] = Pair(point.seconds, base.seconds, plain.alternated and one.alternated,
                                                          bool(one.engine.stands_for), one.child)  # fmt: skip
    return found


def ratios(profiled: Sequence[Profiled], *, resamples: int, seed: int) -> tuple[dict[tuple[int, int, int], Figure], list[str]]:
    """r by (concurrency, context, draft tokens), and why some were refused (`speedup.step_ratio`), one sentence each."""
    found, refused = {}, []
    for place, pair in pairs(profiled).items():
        try:
            r = speedup.step_ratio(pair.speculating, pair.plain, pair=_told(place), paired=pair.paired, resamples=resamples,
                                   seed=seed)  # fmt: skip
        except KitError as error:
            refused.append(str(error))
            continue
        if pair.imitated:
            r = replace(r, kind="modelled", source=f"{r.source}, by plain steps of as many tokens: the draft left out")
        found[place] = r
    return found, refused


def whole_ratios(
    profiled: Sequence[Profiled], subject: Subject, *, resamples: int, seed: int
) -> tuple[dict[tuple[int, int, int], Figure], list[str]]:
    """r of the whole of a cut geometry, "modelled" from two cuts (`whole.ratio`), and why some could not be told. Both empty
    where nothing was cut, or only one cut was timed."""
    found, refused = {}, []
    few, many = pairs(profiled, "fewer"), pairs(profiled)
    for place in [place for place in many if place in few]:
        cuts = [whole.Cut(layers=layers, plain=pair.plain, speculating=pair.speculating, paired=pair.paired)
                for layers, pair in ((subject.geometry.layers, many[place]), (subject.fewer or 0, few[place]))]  # fmt: skip
        try:
            together = many[place].child == few[place].child != "" and many[place].paired and few[place].paired
            found[place] = whole.ratio(*cuts, subject.layers, pair=_told(place), together=together, resamples=resamples,
                                       seed=seed)  # fmt: skip
        except KitError as error:
            refused.append(str(error))
    return found, refused


def _told(place: tuple[int, int, int]) -> str:
    batch, context, depth = place
    return f"{depth} draft token{'s' * (depth > 1)} at concurrency {batch}, context {context:,}"


def step_rows(profiled: Sequence[Profiled], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """A row a point: engine, its group, draft tokens, batch, context, milliseconds with their interval, steps, tokens a step."""
    rows = []
    for one in profiled:
        for point in one.points:
            step = figures.mean([1000 * s for s in point.seconds], unit="ms", source="steps", resamples=resamples, seed=seed)
            rows.append({"name": one.engine.name, "group": one.engine.group, "draft_tokens": one.engine.depth,
                         "batch": point.batch, "context": point.context, "ms": step.value, "low": step.low, "high": step.high,
                         "steps": step.n, "tokens_per_step": point.tokens_per_step})  # fmt: skip
    return rows


def choices(profiled: Sequence[Profiled], known: Mapping[int, Figure], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """The draft tokens with most tokens a second at each batch and context (0: plain decoding is best), by goodput."""
    steps: dict[tuple[int, int], dict[int, Figure]] = {}
    for one in profiled:
        if not one.engine.group and (one.engine.baseline or one.engine.draft):
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


def fits(measured: collective.Measured) -> dict[str, fabric.Line]:
    """The latency + bandwidth line of each way that was timed at two sizes or more, through its medians."""
    return {way: fabric.fit([(timing.size, 1e6 * timing.median) for timing in measured.of(way)])
            for way in measured.ways if len(measured.of(way)) > 1}  # fmt: skip
