"""Every knob, once: its name, meaning, range and default.

A parameter file says only what differs. Reads are recorded leaf by leaf (`params.training.epochs` notes
"training.epochs"), so that a stage is run again only when a value that it really read has changed.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eagle3kit import params_text
from eagle3kit.params_base import Float, Int, Recorded, Section
from eagle3kit.params_server import Server


class Target(Section):
    """The model that is made faster."""

    model: str = Field("smollm2-135m-instruct", min_length=1, description="bundled name, local folder or hub id")
    revision: str | None = Field(None, description="git revision of a hub model; quote one that looks like a number")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="number type the target runs in")
    trust_remote_code: bool = Field(False, description="run code that comes with the model: only if you have read it")


class Dataset(Section):
    """What the draft learns from."""

    sources: list[str] = Field(
        ["mt-bench", "human-eval"], min_length=1, description="bundled names, .jsonl/.json/.parquet files, hub ids"
    )
    samples: Int = Field(200, ge=2, description="conversations to use in all; fewer if the sources hold fewer")
    held_out_percent: Float = Field(10.0, gt=0, le=50, description="share kept from training, percent, up to 50")
    held_out_least: Int = Field(1, ge=1, description="conversations kept from training at least, up to half of `samples`")
    max_length: Int = Field(512, ge=16, description="tokens; longer conversations are cut at the end, and counted")
    regenerate: bool = Field(True, description="have the target write the answers itself")
    max_new_tokens: Int = Field(128, ge=1, description="tokens of a regenerated answer, at most")
    temperature: Float = Field(0.0, ge=0, le=2, description="of regenerated answers; 0 is greedy")
    in_flight: Int = Field(64, ge=1, le=4096, description="requests asked at once")
    allowed_bad_percent: Float = Field(1.0, ge=0, le=100, description="unusable rows that do not yet stop it, percent")
    chat_template: str | None = Field(None, description="path of a Jinja file that replaces the target's own template")
    system_prompt: str | None = Field(None, description="put before conversations that have none")
    reuse: bool = Field(True, description="take answers that another run in the outputs folder had for the same prompts")


class HiddenStates(Section):
    """What the draft sees of the target."""

    layers: list[Annotated[Int, Field(ge=0)]] | None = Field(
        None, min_length=1, description="auxiliary layers, rising; null is [2, n/2, n-3] of an n-layer target"
    )
    format: Literal["pt", "safetensors"] = Field("pt", description="files of samples: data_N.pt or hs_N.safetensors")
    connector: Literal["batched", "vllm"] = Field("batched", description="what writes states: a step at a time, or vLLM's own")
    in_flight: Int = Field(8, ge=1, le=4096, description="requests asked at once")
    enforce_eager: bool | None = Field(None, description="as server.enforce_eager, for this stage alone; null: that")
    block_size: Int | None = Field(
        None, ge=1, le=1024, description="tokens in a cache block of this stage; large ones cost less a request; null: vLLM's own"
    )
    reuse: bool = Field(True, description="link states that another run in the outputs folder has of the same tokens")
    audit_samples: Int = Field(16, ge=0, description="samples whose next tokens are checked against the states")
    minimum_agreement: Float | None = Field(
        None, ge=0, le=1, description="audit share that stops the stage; null: 0.9 for the target's own greedy answers, else 0"
    )


class Vocabulary(Section):
    """Which tokens the draft may say."""

    size: Int = Field(8192, ge=16, description="tokens in the draft's vocabulary, at most the target's")
    always: list[str] = Field([], description="tokens always kept, as text")


class Training(Section):
    """How the draft learns."""

    epochs: Int = Field(8, ge=1, le=1000, description="passes over the samples")
    learning_rate: Float = Field(1e-3, gt=0, le=1, description="AdamW's, at its peak")
    optimizer: Literal["adamw", "muon"] = Field("muon", description="muon: Muon for matrices, AdamW for the rest")
    muon_learning_rate: Float = Field(2e-3, gt=0, le=1, description="Muon's, at its peak")
    weight_decay: Float = Field(0.01, ge=0, lt=1, description="pull of weights towards zero")
    scheduler: Literal["linear", "cosine", "none"] = Field("cosine", description="fall of the rate after warm-up")
    warmup_percent: Float = Field(2.0, ge=0, le=50, description="of all steps, percent")
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = Field(
        "kl_div", description="between draft and target at each draft step"
    )
    loss_implementation: Literal["eager", "fused"] = Field("eager", description="fused needs Triton")
    step_loss_decay: Float = Field(1.0, gt=0, le=1, description="weight of each draft step against the one before")
    draft_steps: Int = Field(3, ge=1, le=8, description="draft steps unrolled in training, 1 to 8")
    tokens_per_step: Int = Field(1024, ge=16, description="tokens packed into one step; at least dataset.max_length")
    attention: Literal["sdpa", "eager", "simple_flex_attention"] = Field("sdpa", description="the draft's attention")
    norm_before_residual: bool = Field(True, description="normalise the states before the residual branch")
    norm_before_fc: bool = Field(False, description="normalise the joined states before they are narrowed")
    norm_output: bool = Field(False, description="normalise what one draft step hands to the next")
    draft_layers: Int = Field(1, ge=1, le=8, description="decoder layers of the draft")
    draft_key_value_heads: Int | None = Field(
        None, ge=1, le=1024, description="heads for keys and values in the draft, dividing its heads; null: as the target"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number type the draft is trained in")
    compile: Literal["whole", "blocks", "none"] = Field(
        "whole", description="on a GPU: the draft as one, only attention and loss (sooner started), nothing (with sdpa)"
    )
    processes: Int = Field(1, ge=0, le=64, description="processes that train, one a GPU, each on its own batches; 0: all GPUs")
    shard: bool = Field(False, description="of several processes: each holds a part of the draft (FSDP), not a copy of it (DDP)")


class Acceptance(Section):
    """How the draft is measured."""

    draft_tokens: Int = Field(3, ge=1, le=8, description="tokens proposed per verify step, 1 to 8")
    prompts: Int = Field(48, ge=1, description="held-out prompts to serve; fewer if fewer are held out")
    max_new_tokens: Int = Field(128, ge=1, description="tokens of each answer, at most")
    in_flight: Int = Field(8, ge=1, le=4096, description="requests asked at once")
    servers_at_once: bool = Field(False, description="start all servers of 08 together: sooner done where memory holds them")
    ngram: bool = Field(True, description="measure n-gram speculation beside the draft")
    ngram_min: Int = Field(2, ge=1, le=64, description="shortest n-gram looked up")
    ngram_max: Int = Field(4, ge=1, le=64, description="longest n-gram looked up, at least ngram_min")
    repeat_plain: bool = Field(False, description="serve plain a second time: how often do answers differ by themselves?")
    temperature: Float = Field(1.0, gt=0, le=2, description="of the estimate for sampled answers; serving is greedy")
    resamples: Int = Field(2000, ge=100, le=1_000_000, description="bootstrap resamples behind an interval")


class Profile(Section):
    """What is asked of the machine before anything is trained: where decode time goes, what speculation would cost."""

    geometry: str | None = Field(
        None, description="config.json (file or folder), llama-3.1-8b or kimi-k2.5: profiled with dummy weights; null: the target"
    )
    geometry_layers: Int | None = Field(
        None, ge=3, description="layers kept of `geometry`; from 4 on half are timed too, for r of the whole; null: all"
    )
    geometry_experts: Int | None = Field(None, ge=2, description="routed experts kept of `geometry`; null: all")
    plan_seconds: Float = Field(
        8.0, ge=0, le=600, description="seconds of real work timed for the plan where no earlier run tells its rate; 0: none"
    )
    collective: bool = Field(True, description="time the all-reduce alone")
    step_times: bool = Field(True, description="time decode steps with and without speculation")
    trace: bool = Field(True, description="trace decode steps, one trace a rank")
    trace_tensor_parallel: Int | None = Field(
        None, ge=1, le=64, description="ranks of the traced engine; null: server.tensor_parallel"
    )
    custom_allreduce: bool = Field(True, description="time the engine without vLLM's own all-reduce too, where it has one")
    batches: list[Annotated[Int, Field(ge=1, le=8192)]] | None = Field(
        None, min_length=1, description="sequences decoded at once; null: 1, and as many as 08 serves (acceptance.in_flight)"
    )
    contexts: list[Annotated[Int, Field(ge=1)]] = Field([128], min_length=1, description="prompt tokens of each sequence")
    draft_tokens: list[Annotated[Int, Field(ge=1, le=16)]] | None = Field(
        None, min_length=1, description="draft tokens a verify step; null: acceptance.draft_tokens"
    )
    steps: Int = Field(12, ge=4, le=10_000, description="decode steps timed for each batch, context and draft")
    engines_at_once: bool = Field(
        False, description="on a GPU: start all engines of 01 together, measure them in turn: sooner done where memory holds them"
    )
    repeats: Int = Field(40, ge=5, le=100_000, description="all-reduces timed of each size")
    acceptance_length: Float | None = Field(
        None, ge=1, le=17, description="tokens a verify step that the verdict reckons with; null: as published, else 2"
    )


class Params(Recorded):
    """All parameters of a run. `load` makes it from a file, `from_namespace` inside a notebook."""

    run: str = Field(
        "cpu", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="folder under outputs/: letters, digits, . _ -"
    )
    seed: Int = Field(0, ge=0, lt=2**32, description="of every random choice")
    target: Target = Target()
    dataset: Dataset = Dataset()
    hidden_states: HiddenStates = HiddenStates()
    vocabulary: Vocabulary = Vocabulary()
    training: Training = Training()
    acceptance: Acceptance = Acceptance()
    profile: Profile = Profile()
    server: Server = Server()
    cluster: str | None = Field(
        None, pattern=r"^(auto|ray://[^\s/]+:\d+|[^\s/:]+:\d+)$",
        description="machines joined by Ray that share 02, 03, 06: auto, ray://HOST:PORT or HOST:PORT; null: this one alone",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, data: Any) -> Any:
        # Each Params owns its sections: a default shared by two would mix up what each has read.
        return {name: {} for name in cls.sections()} | data if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _fits_together(self) -> "Params":
        data, need = self.dataset, self.dataset.max_length
        layers = self.hidden_states.layers
        if layers is not None and layers != sorted(set(layers)):
            rising = sorted(set(layers))
            raise ValueError(f"hidden_states.layers is {layers}: layers must rise, none twice; try {rising}")
        if len(set(data.sources)) != len(data.sources):
            raise ValueError(f"dataset.sources is {data.sources}: a source is named twice; name each once")
        if data.regenerate and data.max_new_tokens >= need:
            raise ValueError(
                f"dataset.max_new_tokens is {data.max_new_tokens} but dataset.max_length is {need}: "
                "an answer must leave room for its prompt; lower the first or raise the second"
            )
        if self.acceptance.ngram_min > self.acceptance.ngram_max:
            raise ValueError(
                f"acceptance.ngram_min is {self.acceptance.ngram_min} but acceptance.ngram_max is "
                f"{self.acceptance.ngram_max}: the shortest cannot exceed the longest"
            )
        if self.training.tokens_per_step < need:
            raise ValueError(
                f"training.tokens_per_step is {self.training.tokens_per_step} but dataset.max_length is {need}: "
                "the longest conversation must fit into one step; raise the first or lower the second"
            )
        if self.server.max_model_len is not None and self.server.max_model_len <= need:
            raise ValueError(
                f"server.max_model_len is {self.server.max_model_len} but dataset.max_length is {need}: "
                "the server needs at least one token more than the longest conversation"
            )
        if self.cluster and self.server.url:
            raise ValueError(
                f"cluster is {self.cluster} and server.url is {self.server.url}: both say who answers; leave one out "
                "(a cluster starts servers of its own)"
            )
        # Last, so that these checks count as nobody's reads.
        seen: set[str] = set()
        self._watch(seen, "")
        for name in self.sections():
            object.__getattribute__(self, name)._watch(seen, f"{name}.")
        return self

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """The sections by name, in the order of the file."""
        kinds = {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    def leaves(self) -> dict[str, Any]:
        """Every value by its dotted name, as JSON holds it; notes nothing as read."""
        flat = {}
        for name, value in self.model_dump(mode="json").items():
            inside = isinstance(value, dict)
            flat |= {f"{name}.{leaf}": inner for leaf, inner in value.items()} if inside else {name: value}
        return flat

    def reads(self) -> dict[str, Any]:
        """The values read so far, by dotted name. The run's name and the cluster are left out: they say where, not what."""
        seen = object.__getattribute__(self, "_seen")
        return {name: value for name, value in self.leaves().items() if name in seen and name not in ("run", "cluster")}

    @classmethod
    def load(cls, path: Path | str, overrides: dict[str, str] | None = None) -> "Params":
        """The parameters in a YAML file, `{"section.key": "text"}` on top; KitError names each mistake."""
        return params_text.load(cls, path, overrides or {})

    @classmethod
    def from_namespace(cls, namespace: dict[str, Any]) -> "Params":
        """The parameters in a notebook's globals(); KitError for a typo, a bad value or a lost `parameters` tag."""
        return params_text.from_namespace(cls, namespace)
