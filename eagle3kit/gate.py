"""The one-sample gate: extract one sample, learn it by heart, serve it; the served block must be accepted whole.

A draft that has learned one answer by heart predicts every token of it. If vLLM then does not keep every draft token, the
states, layer ids, vocabulary, RoPE, norms or the export differ between training and serving: nothing else can be the reason.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit import chat_template, checkpoint, conversations, draft, hidden_states, server, target, training, vocabulary
from eagle3kit.acceptance import Acceptance, total
from eagle3kit.errors import KitError
from eagle3kit.predict import load_draft, predict
from eagle3kit.samples import Store
from eagle3kit.served import Prompt, measure

if TYPE_CHECKING:
    from eagle3kit.conversations import Sample
    from eagle3kit.params import Params

COPIES, EPOCHS = 24, 10  # steps an epoch, and epochs: a page learned by heart, and no checkpoint more than needed
RATE = 3e-3
SHORTEST = 8  # tokens; a shorter answer has too few blocks to say anything


@dataclass(frozen=True)
class Gate:
    """How it went: the sample's tokens, the acceptance `learned` (replay, without serving) and `served` (vLLM's counters),
    accepted draft tokens of each verify step where this vLLM tells, whether the served answer is the recorded one."""

    source: str
    tokens: int
    answer_tokens: int
    learned: Acceptance
    served: Acceptance
    steps: list[int] | None
    same_answer: bool
    draft: Path

    @property
    def knows(self) -> bool:
        """Whether the draft has learned the sample: every draft of the replay is kept, but for the answer's end."""
        return _whole(self.learned)

    @property
    def passed(self) -> bool:
        """Learned, answered alike, and every block but the last accepted whole."""
        if not self.knows or not self.same_answer:
            return False
        depth = len(self.served.accepted)
        return all(step == depth for step in self.steps[:-1]) if self.steps else _whole(self.served)

    @property
    def words(self) -> str:
        """The verdict in a sentence, and what to do."""
        depth = len(self.served.accepted)
        counts = (f"learned to {self.learned.length:.2f} of {depth + 1}, served {self.served.length:.2f} "
                  f"({self.served.drafts} drafts)")  # fmt: skip
        if self.passed:
            return f"the gate holds: {counts}; every block accepted whole"
        if not self.knows:
            return f"NOT LEARNED: {counts}; one sample is not reproduced: raise training.learning_rate, or look at the mask"
        if not self.same_answer:
            return f"OTHER ANSWER: {counts}; speculation changed what the target says: try target.dtype float32"
        return (f"NOT SERVED AS TRAINED: {counts}; run eagle3kit check {self.draft} --target TARGET, and compare layer ids, norm "
                "flags, RoPE and d2t")  # fmt: skip


def _whole(counts: Acceptance) -> bool:
    """Every draft kept whole, the last of the answer aside, which its end may cut."""
    return counts.drafts > 0 and all(accepted >= counts.drafts - 1 for accepted in counts.accepted)


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
    told(f"learning {end - start} tokens by heart, {EPOCHS * COPIES} steps")
    fitted = training.fit(learner, train, once, folder / "checkpoints", recipe, seed=params.seed,
                          report=lambda row: None, told=told)  # fmt: skip
    dtype = getattr(torch, params.target.dtype)
    servable = checkpoint.export(fitted.best, folder / "draft", target=model, dtype=dtype)
    weights = target.weights(model)
    checkpoint.faults(checkpoint.check(servable, geometry=geometry, weights=weights, t2d=t2d, d2t=d2t, layer_ids=layers,
                                       dtype=dtype), servable)  # fmt: skip
    depth = params.acceptance.draft_tokens
    learned = total(predict(load_draft(servable, dtype), [(once.read(0), sample.turns)], weights, geometry, depth=depth).recorded)
    told(f"learned: acceptance length {learned.length:.2f} of {depth + 1} by replay; serving it")
    how = server.Settings.of(params, model, max_model_len=len(sample.input_ids) + depth + 2,
                             speculative={"method": "eagle3", "model": str(servable), "num_speculative_tokens": depth})
    with server.serve(how, folder / "vllm-draft.log") as vllm:
        asked = Prompt(source, sample.input_ids[:start], sample.input_ids[start:end], 0)
        found = measure(vllm, [asked], max_new_tokens=end - start, in_flight=1, depth=depth)
    return Gate(source, len(sample.input_ids), end - start, learned, found.counted, found.steps[0] if found.steps else None,
                found.answers[0] == asked.answer, servable)  # fmt: skip


def _prompt(params: "Params", model: Path) -> tuple[list[int], str]:
    """The first user turn of the first usable conversation, as token ids, and its source."""
    data = params.dataset
    loaded = conversations.load(data.sources, 8, params.seed, data.regenerate, system_prompt=data.system_prompt,
                                allowed_bad_percent=100.0)  # fmt: skip
    words = target.tokenizer(model, params.target.trust_remote_code)
    template = chat_template.read_template(data.chat_template)
    room = data.max_length - SHORTEST
    for conversation in loaded.conversations:
        messages = [m for m in conversation.messages if m["role"] in ("system", "user")]
        first = next(place for place, message in enumerate(messages) if message["role"] == "user")
        prompt = chat_template.next_prompt(words, messages[: first + 1], template)
        if len(prompt) <= room:
            return prompt, conversation.source
    raise KitError(f"the first {len(loaded.conversations)} conversations leave no room for an answer within dataset.max_length "
                   f"({data.max_length} tokens); raise it")  # fmt: skip


def _extract(params, model, geometry, layers, prompt, source, folder, told) -> tuple[Store, "Sample"]:
    """The target's greedy answer to `prompt` and the states of both, from one server that extracts."""
    arriving = folder / "arriving"
    arriving.mkdir()
    most = min(params.dataset.max_new_tokens, params.dataset.max_length - len(prompt))
    how = server.Settings.of(params, model, max_model_len=params.dataset.max_length + 2,
                             **hidden_states.server_options(layers, geometry.layers, arriving))
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
