"""The one-sample gate: extract one sample, learn it by heart, serve it; the served block must be accepted whole.

A draft that has learned one answer by heart predicts every token of it. If vLLM then does not keep every draft token, the
states, layer ids, vocabulary, RoPE, norms or the export differ between training and serving: nothing else can be the reason.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit import chat_template, checkpoint, conversations, draft, hidden_states, server, target, training, vocabulary
from eagle3kit.acceptance import Acceptance, from_steps
from eagle3kit.errors import KitError
from eagle3kit.files import read_json
from eagle3kit.predict import load_draft, predict
from eagle3kit.rows import Unfit
from eagle3kit.samples import Store
from eagle3kit.served import Prompt, measure, room

if TYPE_CHECKING:
    from eagle3kit.conversations import Sample
    from eagle3kit.params import Params

COPIES, EPOCHS = 24, 20  # steps an epoch, and epochs at most: it ends when every draft of the replay is kept
CANDIDATES = 8  # conversations of which the shortest prompt is taken: what lies before the answer only costs time
RATE = 3e-3
SHORTEST = 8  # tokens; a shorter answer has too few blocks to say anything


@dataclass(frozen=True)
class Gate:
    """How it went: the sample's tokens; draft tokens accepted in each verify step as `learned` (replay, without serving) and as
    served (`steps`, None where this vLLM does not tell); vLLM's own counters (`served`); whether the served answer is the
    recorded one. Counts alone cannot tell: a block that breaks in the middle may leave the sums of a whole answer."""

    source: str
    tokens: int
    answer_tokens: int
    learned: list[int]
    served: Acceptance
    steps: list[int] | None
    same_answer: bool
    draft: Path

    @property
    def knows(self) -> bool:
        """Whether the draft has learned the sample: the replay keeps every block whole, the last as far as the answer goes."""
        return _whole(self.learned, len(self.served.accepted))

    @property
    def passed(self) -> bool:
        """Learned, answered alike, and every block but the last accepted whole."""
        if not self.knows or not self.same_answer:
            return False
        depth = len(self.served.accepted)
        if self.steps:
            return _whole(self.steps, depth)
        whole = from_steps(self.learned, depth)  # the last draft may be kept past the answer's end
        return self.served.drafts == whole.drafts and all(map(int.__ge__, self.served.accepted, whole.accepted))

    @property
    def words(self) -> str:
        """The verdict in a sentence, and what to do."""
        depth = len(self.served.accepted)
        counts = (f"learned to {from_steps(self.learned, depth).length:.2f} of {depth + 1}, served {self.served.length:.2f} "
                  f"({self.served.drafts} drafts)")  # fmt: skip
        if self.passed:
            return f"the gate holds: {counts}; every block accepted whole"
        if not self.knows:
            return f"NOT LEARNED: {counts}; one sample is not reproduced: raise training.learning_rate, or look at the mask"
        if not self.same_answer:
            return f"OTHER ANSWER: {counts}; speculation changed what the target says: try target.dtype float32"
        return (f"NOT SERVED AS TRAINED: {counts}; run eagle3kit check {self.draft} --target TARGET, and compare layer ids, norm "
                "flags, RoPE and d2t")  # fmt: skip


class _Learned(Exception):
    """Every block of the replay is kept whole: enough."""


def _whole(steps: Sequence[int], depth: int) -> bool:
    """Every block of an answer accepted whole, the last aside, which the answer's end may cut."""
    return len(steps) > 1 and all(step == depth for step in steps[:-1])


def run(params: "Params", folder: Path, told: Callable[[str], None]) -> Gate:
    """The gate with a run's parameters, in an empty `folder`; `told` hears a line a step.

    Two servers are started: one that gives the answer and its states, one that drafts.

    Raises:
        KitError: no usable conversation, an answer too short, or what the parts raise.
    """
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = target.locate(params.target.model, revision=params.target.revision)
    geometry = target.geometry(model, params.target.trust_remote_code)
    layers = hidden_states.layer_ids(params.hidden_states.layers, geometry.layers)
    prompt, source = _prompt(params, model)
    store, sample = _extract(params, model, geometry, layers, prompt, source, folder, told)
    start, end = sample.turns[0]
    recipe = params.training.model_copy(update={
        "epochs": EPOCHS, "learning_rate": max(RATE, params.training.learning_rate),
        "muon_learning_rate": max(RATE, params.training.muon_learning_rate), "weight_decay": 0.0, "scheduler": "cosine",
        "draft_steps": max(params.training.draft_steps, params.acceptance.draft_tokens),
        "tokens_per_step": max(params.training.tokens_per_step if geometry.hidden_size > 4096 else 16, len(sample.input_ids)),
    })  # fmt: skip
    t2d, d2t = _words(params, model, geometry, sample)
    learner = draft.build(model, t2d, d2t, recipe, layer_ids=layers, seed=params.seed,
                          trust_remote_code=params.target.trust_remote_code)  # fmt: skip
    once = _copies(store, [sample], folder / "once", params, model, geometry, layers)
    train = _copies(store, [sample] * COPIES, folder / "train", params, model, geometry, layers)
    told(f"learning {end - start} tokens by heart, {EPOCHS * COPIES} steps at most")
    weights = target.weights(model, trust_remote_code=params.target.trust_remote_code)
    depth = params.acceptance.draft_tokens
    look = partial(_walk, once=once, turns=sample.turns, weights=weights, geometry=geometry, depth=depth)
    best = _by_heart(learner, train, once, folder / "checkpoints", recipe, params.seed, told, look)
    dtype = getattr(torch, params.target.dtype)
    servable = checkpoint.export(best, folder / "draft", target=model, dtype=dtype)
    checkpoint.faults(checkpoint.check(servable, geometry=geometry, weights=weights, t2d=t2d, d2t=d2t, layer_ids=layers,
                                       dtype=dtype), servable)  # fmt: skip
    learned = look(load_draft(servable, dtype))
    told(f"learned: acceptance length {from_steps(learned, depth).length:.2f} of {depth + 1} by replay; serving it")
    how = server.Settings.of(params, model, max_model_len=room(len(sample.input_ids), depth, geometry.max_positions),
                             speculative={"method": "eagle3", "model": str(servable), "num_speculative_tokens": depth})
    with server.serve(how, folder / "vllm-draft.log") as vllm:
        asked = Prompt(source, sample.input_ids[:start], sample.input_ids[start:end], 0)
        found = measure(vllm, [asked], max_new_tokens=end - start, in_flight=1, depth=depth)
    return Gate(source, len(sample.input_ids), end - start, learned, found.counted, found.steps[0] if found.steps else None,
                found.answers[0] == asked.answer, servable)  # fmt: skip


def _walk(model, *, once: Store, turns, weights, geometry, depth: int) -> list[int]:
    """Draft tokens accepted in each verify step of the sample, by replay."""
    (steps,) = predict(model, [(once.read(0), turns)], weights, geometry, depth=depth).steps
    return [step.accepted for step in steps]


def _by_heart(learner, train: Store, once: Store, folder: Path, recipe, seed: int, told, look) -> Path:
    """The checkpoint of the best epoch, training no longer than it takes to keep every block whole."""

    def listen(line: str) -> None:
        told(line)
        steps = look(learner)
        if _whole(steps, look.keywords["depth"]):
            raise _Learned(list(read_json(folder / "history.json")["records"])[-1])

    try:
        return training.fit(learner, train, once, folder, recipe, seed=seed, report=lambda row: None, told=listen).best
    except _Learned as learned:  # the epoch's checkpoint is written before its line is told
        return folder / learned.args[0]


def _prompt(params: "Params", model: Path) -> tuple[list[int], str]:
    """The shortest first user turn of a few conversations, as token ids, and its source."""
    data = params.dataset
    loaded = conversations.load(data.sources, CANDIDATES, params.seed, data.regenerate, system_prompt=data.system_prompt,
                                allowed_bad_percent=100.0)  # fmt: skip
    words = target.tokenizer(model, params.target.trust_remote_code)
    template = chat_template.read_template(data.chat_template)
    prompts = []
    for conversation in loaded.conversations:
        messages = [m for m in conversation.messages if m["role"] in ("system", "user")]
        first = next(place for place, message in enumerate(messages) if message["role"] == "user")
        try:
            prompts.append((chat_template.next_prompt(words, messages[: first + 1], template), conversation.source))
        except Unfit:  # the template refuses this one; the stage 02_dataset lists such rows
            continue
    if not prompts:
        raise KitError(f"dataset.sources: the target's chat template takes none of the first {len(loaded.conversations)} "
                       "conversations; run the stage 02_dataset, which says why")  # fmt: skip
    shortest = min(prompts, key=lambda prompt: len(prompt[0]))
    if len(shortest[0]) > data.max_length - SHORTEST:
        raise KitError(f"none of the first {len(prompts)} conversations leaves room for an answer within dataset.max_length "
                       f"({data.max_length} tokens); raise it")  # fmt: skip
    return shortest


def _extract(params, model, geometry, layers, prompt, source, folder, told) -> tuple[Store, "Sample"]:
    """The target's greedy answer to `prompt` and the states of both, from one server that extracts."""
    arriving = folder / "arriving"
    arriving.mkdir()
    most = min(params.dataset.max_new_tokens, params.dataset.max_length - len(prompt))
    how = server.Settings.of(params, model, max_model_len=params.dataset.max_length + 2,
                             **hidden_states.server_options(layers, geometry.layers, arriving, params.hidden_states.connector))
    how = replace(how, max_num_seqs=min(how.max_num_seqs, 8))
    with server.serve(how, folder / "vllm-states.log") as vllm:
        # This kind of server "drafts" the token it has just sampled, which is verified like any other: the answer is greedy.
        answer = next(iter(vllm.complete([prompt], max_tokens=most, in_flight=1)))[1].token_ids
        if len(answer) < SHORTEST:
            raise KitError(f"the target answers the first conversation of {source} with {len(answer)} tokens, too few to learn; "
                           "change dataset.sources or seed")  # fmt: skip
        sample = conversations.make_sample("gate", source, prompt + answer, [(len(prompt), len(prompt) + len(answer))])
        told(f"{source}: {len(prompt)} tokens of prompt, {len(answer)} of answer; extracting their states")
        store = _begun([sample], folder / "states", params, model, geometry, layers)
        hidden_states.extract(vllm, [sample], [0], store, states=len(layers) + 1, hidden_size=geometry.hidden_size, in_flight=1,
                              storage=arriving)  # fmt: skip
    shutil.rmtree(arriving)  # the answer's own request left states too
    return store, sample


def _begun(samples, folder: Path, params, model, geometry, layers) -> Store:
    identity = {"target": params.target.model, "revision": params.target.revision, "files": target.identity(model),
                "vllm": server.vllm_version(), "dtype": params.target.dtype}  # fmt: skip
    store = Store(folder, params.hidden_states.format)
    store.begin([one.input_ids for one in samples], [one.loss_mask for one in samples],
                hidden_states.manifest(samples, identity, layers, geometry))  # fmt: skip
    return store


def _copies(source: Store, samples, folder: Path, params, model, geometry, layers) -> Store:
    """A store that holds the one sample as often as `samples` does."""
    store = _begun(samples, folder, params, model, geometry, layers)
    one = source.read(0)
    for number in range(len(samples)):
        store.write(number, one)
    return store


def _words(params: "Params", model: Path, geometry, sample: "Sample"):
    """A vocabulary of the parameters' size that holds every token of the answer."""
    words = target.tokenizer(model, params.target.trust_remote_code)
    counts = vocabulary.count_tokens([(sample.input_ids, sample.loss_mask)], geometry.vocab_size)
    forced = vocabulary.special_ids(words, params.vocabulary.always)
    return vocabulary.build(counts, min(params.vocabulary.size, geometry.vocab_size), forced)
