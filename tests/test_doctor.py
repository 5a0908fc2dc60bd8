"""The doctor: whole samples have no bad sign, and of each planted fault the first bad sign names it."""

import re
from dataclasses import replace

import pytest
import tinystates
import torch
from tinymodel import TEXT, make_tiny_tokenizer

from eagle3kit import chat_template, doctor, doctor_layers, doctor_states, doctor_tokens, language_model, target, vocabulary
from eagle3kit.doctor_mapping import convention
from eagle3kit.errors import KitError
from eagle3kit.samples import StatesSample
from eagle3kit.signs import CHECKS, require_sound

torch.set_num_threads(1)

REAL_LAYERS = [2, 15, 27]
ASKED = ["Name three rivers of Europe.", "What is 12 times 4?", "Write one line about the sea.", "Who wrote Hamlet?"]


def answered(model, folder, questions, new_tokens, end=None) -> list[tuple[str, StatesSample]]:
    """The target's own greedy answers through its chat template, and their states by transformers; with `end`, each is
    closed by that token and a line break that the mask leaves out."""
    tokenizer = target.tokenizer(folder)
    layers = REAL_LAYERS if end is None else tinystates.LAYERS
    made = []
    for number, question in enumerate(questions):
        prompt = chat_template.next_prompt(tokenizer, [{"role": "user", "content": question}])
        asked = {"max_new_tokens": new_tokens - number, "do_sample": False, "eos_token_id": None,
                 "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}  # fmt: skip
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), **asked)[0].tolist()
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        if end is not None:
            ids, mask = [*ids, end, tokenizer.encode("\n")[0]], [*mask, 1, 0]
        states = tinystates.states_of(model, ids, layers)
        made.append((f"data_{number}.pt", StatesSample(torch.tensor(ids), torch.tensor(mask), states)))
    return made


@pytest.fixture(scope="module")
def real():
    """The bundled target: (folder, model, samples)."""
    folder = target.locate("smollm2-135m-instruct")
    model = language_model.load(folder)
    return folder, model, answered(model, folder, ASKED, 16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tinystates.lively_target(tmp_path_factory.mktemp("doctor") / "tiny")
    model = tinystates.load(folder)
    end = target.tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
    return folder, model, answered(model, folder, [text[:40] for text in TEXT], 24, end)


def changed(samples, how, which=None):
    """`samples` with `how(sample)` in place of those numbered in `which` (None: all)."""
    return [(name, how(row) if which is None or number in which else row) for number, (name, row) in enumerate(samples)]


def states(row, place, state):
    """`row` with another state at `place`."""
    every = list(row.states)
    every[place] = state
    return replace(row, states=every)


def examined(kit, samples, layers=None, **how):
    folder, model, _ = kit
    found = doctor.layer_matches(samples, folder, layers, model=model, tokens=32)
    return doctor.examine(samples, folder, layers, found=found, **how)


def first_bad(signs):
    bad = [sign for sign in signs if sign.bad]
    assert bad, "nothing was found"
    return bad[0]


# ---- The bundled target


def test_the_targets_own_samples_have_no_bad_sign(real):
    signs = examined(real, real[2], REAL_LAYERS)
    assert [sign.line for sign in signs if sign.bad] == []
    assert {sign.name for sign in signs if sign.number is None} <= {"end of turn"}  # answers of twenty tokens are all cut
    said = {sign.name: sign for sign in signs}
    assert said["own answers"].number == 1 and said["own answers"].n > 50
    assert said["norm applied"].number > 5 * CHECKS["norm applied"].threshold
    assert said["constant states"].number > 10 * CHECKS["constant states"].threshold
    assert said["last layer"].number < 1e-3
    assert max(float(state.abs().max()) for _, row in real[2] for state in row.states) > 10_000  # massive, and normal
    require_sound(signs)


def test_bfloat16_is_no_fault(real):
    rounded = changed(real[2], lambda row: replace(row, states=[state.bfloat16() for state in row.states]))
    assert [sign.line for sign in examined(real, rounded, REAL_LAYERS) if sign.bad] == []


def test_eight_bits_are_no_fault_but_hide_the_length(real):
    def how(row):
        scales = [state.abs().amax(1, keepdim=True) / 448 for state in row.states]
        packed = [(state / scale).to(torch.float8_e4m3fn) for state, scale in zip(row.states, scales, strict=True)]
        return replace(row, states=packed)
    signs = examined(real, changed(real[2], how), REAL_LAYERS)  # fmt: skip
    assert [sign.line for sign in signs if sign.bad] == []
    assert "norm applied" in {sign.name for sign in signs if sign.number is None}


def test_an_answer_that_got_stuck_on_one_token_is_no_fault(real):
    """As small targets write them: "1000000000…" up to the longest answer."""
    folder, model, samples = real
    name, row = samples[0]
    ids = row.input_ids.tolist() + target.tokenizer(folder).encode("0") * 120
    mask = torch.cat([row.loss_mask, torch.ones(120, dtype=torch.long)])
    stuck = (name, StatesSample(torch.tensor(ids), mask, tinystates.states_of(model, ids, REAL_LAYERS)))
    found = doctor_states.of_states([stuck, *samples[1:]], REAL_LAYERS)
    assert [sign.line for sign in found if sign.bad] == []
    constant = next(sign for sign in found if sign.name == "constant states")
    assert constant.number > 10 * CHECKS["constant states"].threshold
    copied = replace(stuck[1], states=[state.mean(0).expand(state.shape) for state in stuck[1].states])
    assert "constant states" in [sign.name for sign in doctor_states.of_states([(name, copied)], REAL_LAYERS) if sign.bad]


def normed(real):
    norm = real[1].model.norm
    return lambda row: states(row, 3, norm(row.states[3]).detach())


EVERY: dict[tuple[int, ...], list[torch.Tensor]] = {}  # tokens -> what enters each layer, computed once


def of_layers(real, layers, last=None):
    """The samples with the states of other layers than [2, 15, 27], or another last one."""
    def how(row):
        tokens = tuple(row.input_ids.tolist())
        if tokens not in EVERY:
            EVERY[tokens] = tinystates.states_of(real[1], list(tokens), list(range(30)))
        return replace(row, states=[EVERY[tokens][k] for k in (*layers, last or 30)])
    return how  # fmt: skip


REAL_FAULTS = {
    "after the norm": (normed, "norm applied", "has been applied already"),
    "one layer early": (lambda real: of_layers(real, [2, 15, 27], 29), "last layer", "enters layer 29, 1 layer early"),
    "aux one layer late": (lambda real: of_layers(real, [3, 16, 28]), "auxiliary layers", "those of [3, 16, 28], one layer late"),
    "aux one layer early": (lambda real: of_layers(real, [1, 14, 26]), "auxiliary layers", "[1, 14, 26], one layer early"),
    "aux in another order": (lambda real: of_layers(real, [15, 2, 27]), "auxiliary layers", "[15, 2, 27], in another order"),
    "one aux elsewhere": (lambda real: of_layers(real, [2, 16, 27]), "auxiliary layers", "are those of [2, 16, 27]"),
}


@pytest.mark.parametrize("fault", REAL_FAULTS)
def test_a_fault_of_layers_or_norm_is_named(real, fault):
    plant, name, words = REAL_FAULTS[fault]
    bad = first_bad(examined(real, changed(real[2], plant(real)), REAL_LAYERS))
    assert bad.name == name and words in bad.note, bad.line


def test_without_ids_the_layers_are_told(real):
    by_name = {sign.name: sign for sign in examined(real, real[2])}
    assert not by_name["auxiliary layers"].bad and "those of [2, 15, 27]" in by_name["auxiliary layers"].note


def test_states_under_the_tokens_of_another_sample(real):
    samples = real[2]
    turned = []
    for number, (name, row) in enumerate(samples):
        other = samples[(number + 1) % len(samples)][1]
        length = min(len(row.input_ids), len(other.input_ids))
        turned.append((name, StatesSample(row.input_ids[:length], row.loss_mask[:length], [s[:length] for s in other.states])))
    bad = first_bad(examined(real, turned, REAL_LAYERS))
    assert bad.name == "own tokens" and "of those of data_1.pt" in bad.note, bad.line


def test_where_the_target_does_not_fit_it_says_so(real):
    why = language_model.refusal(real[0], free_bytes=2**30)
    assert "takes about 0.6 GiB in float32, and half of the free memory is 0.5 GiB" in why
    assert language_model.refusal(real[0], free_bytes=8 * 2**30) is None
    signs = doctor.examine(real[2], real[0], REAL_LAYERS, found=why)
    silent = [sign for sign in signs if sign.name in ("auxiliary layers", "last layer")]
    assert [(sign.word, sign.number, sign.note) for sign in silent] == [("not checked", None, why)] * 2
    # One layer early cannot be told from other people's words then, so both are named.
    bad = first_bad(doctor.examine(changed(real[2], of_layers(real, [2, 15, 27], 29)), real[0], REAL_LAYERS, found=why))
    assert bad.name == "own answers" and "or the last state is of an earlier layer, which was not checked" in bad.note
    # The norm that was applied already needs no forward.
    assert first_bad(doctor.examine(changed(real[2], normed(real)), real[0], REAL_LAYERS, found=why)).name == "norm applied"


# ---- A tiny target


def test_samples_of_a_tiny_target_have_no_bad_sign(tiny):
    signs = examined(tiny, tiny[2], tinystates.LAYERS)
    assert [sign.line for sign in signs if sign.bad or sign.number is None] == []
    assert {sign.name for sign in signs} == set(CHECKS) - {"d2t", "special tokens", "frequencies", "coverage"}


def shifted(row, by):
    return replace(row, loss_mask=row.loss_mask.roll(by))


def without_end(row):
    mask = row.loss_mask.clone()
    mask[-2] = 0
    return replace(row, loss_mask=mask)


def holes(value):
    def how(row):
        state = row.states[1].clone()
        state[5] = value
        return states(row, 1, state)
    return how  # fmt: skip


def copied(row):
    state = row.states[2].clone()
    state[8:12] = state[4:8]
    return states(row, 2, state)


def steady(row):
    same = row.states[1].mean(0).expand(row.states[1].shape) + 1e-6 * row.states[1]
    return states(row, 1, same)


def elsewhere(tiny):
    """Other words than the target's in the second half of the answers, and the states that they then have."""
    generator = torch.Generator().manual_seed(0)

    def how(row):
        ids, answer = row.input_ids.clone(), row.loss_mask.nonzero().squeeze(1)[:-1]
        late = answer[len(answer) // 2 :]
        ids[late] = torch.randint(3, 250, (len(late),), generator=generator)
        return StatesSample(ids, row.loss_mask, tinystates.states_of(tiny[1], ids.tolist()))
    return changed(tiny[2], how)  # fmt: skip


TINY_FAULTS = {
    "prefix cache": (lambda row: replace(row, states=[state[6:] for state in row.states]), "states per token",
                     "prefix caching off"),
    "dropped": (lambda row: replace(row, states=row.states[:3]), "states a sample", "the final layer is missing"),
    "nan": (holes(float("nan")), "finite values", "data_0.pt, state 1"),
    "infinite": (holes(float("inf")), "finite values", "NaN or infinite"),
    "zero": (lambda row: states(row, 3, torch.zeros_like(row.states[3])), "zero states", "in data_0.pt, state 3"),
    "one zero": (holes(0.0), "zero states", "all zero"),
    "constant": (steady, "constant states", "state 1 hardly changes"),
    "repeated": (copied, "repeated states", "are those of other tokens too"),
    "last again": (lambda row: states(row, 3, row.states[2]), "last state is its own", "the last state is state 2 again"),
    "other vocabulary": (lambda row: replace(row, input_ids=row.input_ids + 500), "token ids", "vocabulary of 512"),
    "empty mask": (lambda row: replace(row, loss_mask=row.loss_mask * 0), "supervised tokens", "first data_0.pt"),
    "mask late": (lambda row: shifted(row, 1), "mask place", "most spans begin 1 token late"),
    "mask early": (lambda row: shifted(row, -1), "mask place", "most spans begin 1 token early"),
    "no end": (without_end, "end of turn", "with one that the mask leaves out"),
    "another target": (lambda row: replace(row, states=[state.flip(1) for state in row.states]), "auxiliary layers",
                       "is of no layer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TINY_FAULTS)
def test_a_fault_is_the_first_bad_sign(tiny, fault):
    how, name, words = TINY_FAULTS[fault]
    bad = first_bad(examined(tiny, changed(tiny[2], how), tinystates.LAYERS))
    assert bad.name == name and words in bad.note, bad.line
    assert bad.word == "FAULT" and bad.reason.startswith(("derived", "measured")) and bad.effect in bad.line
    with pytest.raises(KitError, match=f"\n{name}: "):
        require_sound([bad])


def test_one_bad_sample_among_good_ones_is_enough(tiny):
    bad = first_bad(examined(tiny, changed(tiny[2], holes(0.0), [3]), tinystates.LAYERS))
    assert bad.name == "zero states" and "in data_3.pt, state 1" in bad.note and 0 < bad.number < 0.01


def test_the_turns_of_another_family(tiny):
    """The same words in Llama 3's frame, which this tokenizer takes for plain text."""
    tokenizer = target.tokenizer(tiny[0])
    frame = tokenizer.encode("<|start_header_id|>assistant<|end_header_id|>\n\n")

    def how(row):
        start = int(row.loss_mask.nonzero()[0])
        ids = torch.cat([row.input_ids[1 : start - 4], torch.tensor(frame), row.input_ids[start:]])
        mask = torch.cat([torch.zeros(len(ids) - int(row.loss_mask[start:].numel()), dtype=torch.long), row.loss_mask[start:]])
        return StatesSample(ids, mask, tinystates.states_of(tiny[1], ids.tolist()))
    bad = first_bad(examined(tiny, changed(tiny[2], how), tinystates.LAYERS))  # fmt: skip
    assert bad.name == "chat template" and "the text holds <|start_header_id|>" in bad.note, bad.line


def test_sampled_answers_are_judged_as_such(tiny):
    loose = elsewhere(tiny)
    bad = first_bad(examined(tiny, loose, tinystates.LAYERS))
    assert bad.name == "own answers" and "other people's agree less" in bad.note and 0.2 < bad.number < 0.8, bad.line
    assert [sign.name for sign in examined(tiny, loose, tinystates.LAYERS, greedy=False) if sign.bad] == []


def test_without_a_target_nothing_of_it_is_called_sound(tiny):
    signs = doctor.examine(tiny[2], None, tinystates.LAYERS)
    assert {sign.word for sign in signs} == {"sound", "not checked"}
    unknown = [sign for sign in signs if sign.word == "not checked"]
    assert len(unknown) == 11 and all("none was named" in sign.note and sign.number is None for sign in unknown)
    shown = doctor.rows(signs)
    assert shown[0]["check"] == "states per token" and shown[0]["bad"] == "above 0" and shown[-1]["verdict"] == "not checked"


def test_states_of_another_width_are_not_compared(tiny):
    narrow = changed(tiny[2], lambda row: replace(row, states=[state[:, :32] for state in row.states]))
    signs = doctor.examine(narrow, tiny[0], tinystates.LAYERS)
    assert {sign.note for sign in signs if sign.word == "not checked"} == {"the states are not of the target's width 64"}


# ---- Norms of 1 + w


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny Gemma 3, whose norms multiply by 1 + w."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

    folder = tmp_path_factory.mktemp("doctor") / "gemma"
    tokenizer = make_tiny_tokenizer(512)
    config = Gemma3TextConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0,
                              eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config)
        for weight in model.parameters():
            weight.data = torch.randn_like(weight) * (0.7 if weight.ndim == 1 else 0.2)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = tinystates.load(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return folder, model, answered(model, folder, [text[:40] for text in TEXT], 24, end)


def test_a_norm_of_one_plus_w(gemma):
    assert target.geometry(gemma[0]).norm_adds_one
    assert [sign.line for sign in examined(gemma, gemma[2], tinystates.LAYERS) if sign.bad] == []
    # As a trainer that multiplies by w reads the same samples:
    bad = first_bad(examined(gemma, gemma[2], tinystates.LAYERS, reader_adds_one=False))
    assert bad.name == "final norm" and "predicted best by head(norm(x)), the norm multiplying by 1 + w" in bad.note, bad.line
    bad = first_bad(examined(gemma, changed(gemma[2], normed(gemma)), tinystates.LAYERS))
    assert bad.name == "norm applied"


# ---- Parts


def test_spans_and_distances():
    assert doctor_tokens.spans([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)] and doctor_tokens.spans([1]) == [(0, 1)]
    assert doctor_tokens.spans([0, 0]) == []
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(20, 16, generator=generator)
    huge = state + torch.tensor([24_960.0] + [0.0] * 15)  # one number that is huge at every token hides nothing
    assert doctor_layers.distance(huge, huge) == 0
    other = torch.randn(20, 16, generator=generator) + torch.tensor([24_960.0] + [0.0] * 15)
    assert doctor_layers.distance(other, huge) > 1


def test_samples_that_cannot_be_computed_are_not(tiny):
    folder, model, samples = tiny
    for how, words in ((TINY_FAULTS["dropped"][0], r"\[3\] states a sample do not fit"),
                       (TINY_FAULTS["prefix cache"][0], "data_0.pt holds states"),
                       (TINY_FAULTS["other vocabulary"][0], "data_0.pt holds no tokens of this target's vocabulary of 512")):
        why = doctor.layer_matches(changed(samples, how), folder, tinystates.LAYERS, model=model)
        assert isinstance(why, str) and re.search(words, why), why
    assert doctor.layer_matches([], folder, tinystates.LAYERS, model=model) == "there are no samples"


def test_a_model_without_a_list_of_layers_is_refused(tiny):
    with pytest.raises(KitError, match="LlamaForCausalLM has 0 lists of 9 layers"):
        language_model.forward(tiny[1], torch.tensor([1, 2, 3]), 9)


# ---- Mappings


@pytest.fixture(scope="module")
def counted():
    """(counts of the answers, t2d, d2t): a vocabulary of 2,000 tokens as words have it, 300 kept."""
    generator = torch.Generator().manual_seed(0)
    counts = (20_000 / (torch.randperm(2000, generator=generator) + 1)).long()
    return counts, *vocabulary.build(counts, 300, [0, 1])


SPECIAL = {0: "<|endoftext|>", 1: "<|im_end|>", 5000: "<|unknown to the model|>"}


def test_a_mapping_of_its_own_data_has_no_bad_sign(counted):
    counts, t2d, d2t = counted
    signs = doctor.examine_mapping(t2d, d2t, counts, special=SPECIAL, counts=counts)
    assert [sign.word for sign in signs] == ["sound"] * 4, [sign.line for sign in signs]
    assert [sign.word for sign in doctor.examine_mapping(t2d, d2t)] == ["sound", *["not checked"] * 3]


def test_what_d2t_is_in_place_of_offsets(counted):
    _, t2d, d2t = counted
    size, places = 300, torch.arange(300)
    swapped, far = d2t.clone(), d2t.clone()
    swapped[10:12] = torch.tensor([d2t[11] + 1, d2t[10] - 1])  # tokens 10 and 11 of the draft, exchanged
    far[-1] = 5000
    for planted, words in (
        (d2t + places, "d2t holds target ids, not offsets"),
        (places, "d2t is arange(D), a placeholder"),
        (torch.zeros_like(d2t), "d2t is all zero, as where it is missing"),
        (swapped, "target ids do not increase: draft token 11"),
        (far, "1 draft tokens come out of range, first d2t[299] at 5299 of 2,000"),
        (d2t[:-1], "of two different mappings"),
        (d2t + 1, "d2t is of another mapping than t2d"),
    ):
        found = convention(t2d, planted)
        assert found.bad and found.name == "d2t" and words in found.note, found.line
    assert not convention(t2d, d2t).bad
    whole = torch.ones(size, dtype=torch.bool)
    assert not convention(whole, torch.zeros(size, dtype=torch.int64)).bad  # the whole vocabulary: zeros are right


def test_a_mapping_from_other_data_or_without_the_special_tokens(counted):
    counts, t2d, d2t = counted
    other = counts.flip(0)
    bad = [sign for sign in doctor.examine_mapping(t2d, d2t, other, special=SPECIAL, counts=other) if sign.bad]
    assert [sign.name for sign in bad] == ["frequencies", "coverage"] and bad[1].number < 0.5, [sign.line for sign in bad]
    # A mapping of one's own is judged on other answers than it was made from; a few more tokens seen once change nothing.
    more = counts.clone()
    more[~t2d] += 1
    sound = doctor.examine_mapping(t2d, d2t, counts, counts=more, own=counts)
    assert not sound[3].bad and sound[3].number == 1, sound[3].line
    many = {token: f"<{token}>" for token in range(60)}  # a fifth of the vocabulary is forced in, ahead of frequent tokens
    forced = doctor.examine_mapping(*vocabulary.build(counts, 300, many), counts, special=many)
    assert not forced[2].bad and forced[2].number == 1, forced[2].line
    few = dict.fromkeys(range(20), "")  # unknown to whoever looks: less is asked then
    unknown = doctor.examine_mapping(*vocabulary.build(counts, 300, few), counts)[2]
    assert not unknown.bad and 0.9 < unknown.number < 0.98 and unknown.threshold == 0.9, unknown.line
    poor = counts.clone()
    poor[:2] = 0
    t2d, d2t = vocabulary.build(poor, 300, [])
    bad = first_bad(doctor.examine_mapping(t2d, d2t, poor, special=SPECIAL, counts=poor))
    assert (bad.name, bad.number) == ("special tokens", 2) and "<|im_end|> (1)" in bad.note
