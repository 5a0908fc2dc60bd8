"""Hidden states: asked for, checked, written, resumed; and an audit that only true states pass."""

import fcntl
import resource
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import tinystates
import torch
from peer import completion, peer
from safetensors.torch import save_file

from eagle3kit import hidden_states, states_audit, target
from eagle3kit.asking import Fleet
from eagle3kit.conversations import Sample
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.samples import StatesSample, Store
from eagle3kit.server import Settings

torch.set_num_threads(1)
LAYERS, H, STATES = tinystates.LAYERS, 64, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tinystates.lively_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return tinystates.load(folder)


@pytest.fixture(scope="module")
def samples(model, folder) -> list[Sample]:
    return tinystates.own_answers(model, folder, 6, 40)


@pytest.fixture(scope="module")
def weights(folder):
    return target.weights(folder)


# ---- Which layers


def test_default_layers_and_those_asked_for():
    assert hidden_states.layer_ids(None, 30) == [2, 15, 27]
    assert hidden_states.layer_ids(None, 61) == [2, 30, 58]
    assert hidden_states.layer_ids(None, 8) == LAYERS
    assert hidden_states.layer_ids([0, 5, 29], 30) == [0, 5, 29]
    assert hidden_states.layer_ids((4,), 30) == [4]


@pytest.mark.parametrize(
    ("asked", "layers", "words"),
    [
        ([2, 15, 30], 30, r"30 is out of range; the target has 30 layers, so ids run from 0 to 29"),
        ([-1, 2], 30, r"-1 is out of range"),
        ([2, 2, 5], 30, r"\[2, 2, 5\] must rise without doubles.*write \[2, 5\]"),
        ([5, 2], 30, r"\[5, 2\] must rise.*write \[2, 5\]"),
        (None, 6, r"the default \[2, 3, 3\] collides for a target of 6 layers; name rising ids between 0 and 5"),
        (None, 2, r"the default \[2, 1, -1\] collides"),
    ],
)
def test_layers_that_cannot_be_are_refused(asked, layers, words):
    with pytest.raises(KitError, match=words):
        hidden_states.layer_ids(asked, layers)


def test_the_server_is_asked_for_these_layers_and_the_last(tmp_path):
    options = hidden_states.server_options([2, 4, 5], 8, tmp_path)
    speculative, transfer = options["speculative"], options["kv_transfer"]
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5, 8]
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}


def test_this_stage_may_have_another_engine_than_the_rest_of_the_run(folder):
    def command(**own):
        params = Params(hidden_states=own, server={"enforce_eager": False})
        settings = Settings.of(params, folder, max_model_len=64, **hidden_states.own_settings(params))
        return settings.command(1)

    usual, other = command(), command(enforce_eager=True, block_size=64)
    assert "--enforce-eager" not in usual and "--block-size" not in usual
    assert "--enforce-eager" in other and other[other.index("--block-size") + 1] == "64"


# ---- Are they right?


def test_every_fault_of_an_answer_is_named(samples, model):
    asked = samples[0].input_ids
    ids = torch.tensor(asked)
    hidden = torch.stack(tinystates.states_of(model, asked), dim=1)

    def check(ids=ids, hidden=hidden):
        hidden_states.check(7, asked, ids, hidden, states=STATES, hidden_size=H)

    check()
    nan, infinite, zero = hidden.clone(), hidden.clone(), hidden.clone()
    nan[3, 2, 1], infinite[0, 0, 0], zero[9, 3] = float("nan"), float("inf"), 0.0
    other = ids.clone()
    other[-1] += 1
    for bad, words in (
        ({"ids": other}, "computed for other tokens than asked"),
        ({"ids": ids[:-1]}, f"computed for other tokens than asked .{len(asked) - 1} beside {len(asked)}"),
        ({"hidden": hidden[:-2]}, f"{len(asked) - 2} states for {len(asked)} tokens; turn prefix caching off"),
        ({"hidden": hidden[:, :-1]}, "3 states a token, 4 asked for"),
        ({"hidden": hidden[:, :, :-1]}, "width 63, but the target's is 64"),
        ({"hidden": nan}, "NaN or infinite"),
        ({"hidden": infinite}, "NaN or infinite"),
        ({"hidden": zero}, "state 3 of token 9 is all zero"),
    ):
        with pytest.raises(KitError, match=f"hidden states of sample 7: .*{words}"):
            check(**bad)


def share(sample: StatesSample, weights, **changes) -> float:
    states, ids = changes.get("states", sample.states), changes.get("ids", sample.input_ids)
    good, n = states_audit.agreement(StatesSample(ids, sample.loss_mask, states), weights, eps=1e-6, adds_one=False)
    assert n == int(sample.loss_mask.sum())
    return good / n


def test_only_true_states_foretell_the_targets_own_words(samples, model, weights):
    found = {"true": [], "shifted": [], "one late": [], "earlier": [], "embedded": []}
    for one in samples:
        sample = tinystates.states_sample(model, one)
        assert len(set(one.input_ids[one.turns[0][0] :])) > 8, "answers that circle would prove nothing"
        *aux, last = sample.states
        embedded, layer_4 = model.get_input_embeddings()(sample.input_ids).detach(), sample.states[1]
        found["true"].append(share(sample, weights))
        found["shifted"].append(share(sample, weights, states=[*aux, last.roll(1, dims=0)]))
        found["one late"].append(share(sample, weights, states=[*aux, last.roll(-1, dims=0)]))
        found["earlier"].append(share(sample, weights, states=[*aux, model.model.norm(layer_4).detach()]))
        found["embedded"].append(share(sample, weights, states=[*aux, embedded]))
    assert found["true"] == [1.0] * len(samples)
    for wrong in ("shifted", "one late", "earlier", "embedded"):
        assert sum(found[wrong]) / len(samples) < 0.25, wrong


def test_final_norm_is_that_of_both_families():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = 5 * torch.randn(7, H, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(H, generator=torch.Generator().manual_seed(1))
    for norm, adds_one in ((LlamaRMSNorm(H, eps=1e-5), False), (Gemma3RMSNorm(H, eps=1e-5), True)):
        norm.weight.data = weight
        mine = hidden_states.normalised(x, weight, eps=1e-5, adds_one=adds_one)
        torch.testing.assert_close(mine, norm(x), rtol=1e-6, atol=1e-6)
        other = hidden_states.normalised(x, weight, eps=1e-5, adds_one=not adds_one)
        assert not torch.allclose(other, norm(x), atol=0.1)


def test_audit_by_source_and_the_least_share(tmp_path, samples, model, folder, weights):
    geometry = target.geometry(folder)
    sides = {"train": samples[:4], "held_out": samples[4:]}
    stores = {side: tinystates.fill(Store(tmp_path / side, "pt"), model, folder, rows) for side, rows in sides.items()}
    audited = states_audit.audit(stores, sides, weights, geometry, most=6)
    assert list(audited) == ["one", "two"]
    assert sum(row["n"] for row in audited.values()) == sum(sum(sample.loss_mask) for sample in samples)
    assert all(row["share"] == 1.0 and row["low"] < 1 <= row["high"] + 1e-9 for row in audited.values())
    states_audit.require_agreement(audited, 1.0)
    few = states_audit.audit(stores, sides, weights, geometry, most=2)
    assert sum(row["n"] for row in few.values()) == sum(sum(samples[k].loss_mask) for k in (0, 3))
    assert states_audit.audit(stores, sides, weights, geometry, most=0) == {}
    states_audit.require_agreement({}, 0.9)
    # Another target's head over the same states.
    strange = weights | {"head": weights["head"].roll(1, dims=0)}
    bad = states_audit.audit(stores, sides, strange, geometry, most=6)
    with pytest.raises(KitError, match=r"only \d+\.\d% of 234 next tokens.*at least 90%.*hidden_states.minimum_agreement"):
        states_audit.require_agreement(bad, 0.9)


# ---- What is missing


def test_what_is_missing(tmp_path, samples, model, folder):
    geometry = target.geometry(folder)
    store = Store(tmp_path, "pt")

    def wanted(layers=LAYERS, rows=samples, **identity):
        return hidden_states.manifest(rows, tinystates.IDENTITY | identity, layers, geometry)

    every = list(range(len(samples)))
    assert hidden_states.missing(store, wanted(), samples) == every
    tinystates.fill(store, model, folder, samples)
    assert hidden_states.missing(store, wanted(), samples) == []
    for other in (wanted([1, 4, 5]), wanted(dtype="bfloat16"), wanted(target="else"), wanted(vllm="0.33"), wanted(revision="a")):
        assert hidden_states.missing(store, other, samples) == every
    assert hidden_states.missing(Store(tmp_path, "safetensors"), wanted(), samples) == every
    store.path(4).unlink()
    assert hidden_states.missing(store, wanted(), samples) == [4]
    # The order of the samples changed: what lies in a place is of other tokens.
    turned = [samples[1], samples[0], *samples[2:]]
    assert hidden_states.missing(store, wanted(rows=turned), turned) == [0, 1, 4]
    # The same tokens, but less of them is an answer now.
    masked = [*samples[:5], Sample("x", "one", samples[5].input_ids, [0] * len(samples[5].input_ids), ())]
    assert hidden_states.missing(store, wanted(rows=masked), masked) == [4, 5]


def test_manifest_says_what_the_samples_are(samples, folder):
    said = hidden_states.manifest(samples, tinystates.IDENTITY, LAYERS, target.geometry(folder))
    assert said["layers"] == LAYERS and said["last"] == 8 and said["hidden_size"] == H
    assert said["lengths"] == [len(sample.input_ids) for sample in samples]
    assert len(set(said["tokens"])) == len(samples) and said["tokens"][0] == hidden_states.token_hash(samples[0].input_ids)
    assert said["turns"][0] == [list(samples[0].turns[0])] and said["sources"][:2] == ["one", "two"]


# ---- Asking a server. It computes with transformers and hands over files as vLLM's connector does


class Extracting:
    """Answers with the states of the prompt, in a file of `folder`; `spoil(nth request, tensors)` may change or refuse them."""

    def __init__(self, model, folder: Path, spoil=None):
        self.model, self.folder, self.spoil = model, folder, spoil or (lambda number, tensors: tensors)
        self.asked: list[list[int]] = []
        self._numbers, self._one = count(), threading.Lock()
        folder.mkdir(exist_ok=True)

    def __call__(self, body):
        assert body["max_tokens"] == 1 and body["temperature"] == 0.0
        with self._one:
            number = next(self._numbers)
            self.asked.append(body["prompt"])
            hidden = torch.stack(tinystates.states_of(self.model, body["prompt"]), dim=1).contiguous()
        tensors = self.spoil(number, {"hidden_states": hidden, "token_ids": torch.tensor(body["prompt"])})
        if isinstance(tensors, tuple):
            return tensors
        path = self.folder / f"{number}.safetensors"
        if tensors is not None:
            self._write_later(path, tensors)
        return completion([5], states=path)

    def _write_later(self, path: Path, tensors):
        lock = open(f"{path}.lock", "w")  # noqa: SIM115 - it is held until the file is whole, after the answer
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write():
            time.sleep(0.05)
            if isinstance(tensors, bytes):
                path.write_bytes(tensors)
            else:
                save_file(tensors, path)
            lock.close()

        threading.Thread(target=write).start()


def extract(server, samples, numbers, store, in_flight=2):
    return hidden_states.extract(server, samples, numbers, store, states=STATES, hidden_size=H, in_flight=in_flight)


def begun(store: Store, samples, folder) -> Store:
    said = hidden_states.manifest(samples, tinystates.IDENTITY, LAYERS, target.geometry(folder))
    store.begin([sample.input_ids for sample in samples], [sample.loss_mask for sample in samples], said)
    return store


@pytest.mark.parametrize("layout", ["pt", "safetensors"])
def test_states_come_over_whole_and_bit_for_bit(tmp_path, samples, model, folder, layout):
    store = begun(Store(tmp_path / "store", layout), samples, folder)
    arriving = tmp_path / "arriving"
    with peer(Extracting(model, arriving), tmp_path) as server:
        tokens = extract(server, samples, list(range(len(samples))), store, in_flight=4)
    assert tokens == sum(len(sample.input_ids) for sample in samples)
    for number, sample in enumerate(samples):
        found = store.read(number)
        assert found.input_ids.tolist() == sample.input_ids and found.loss_mask.tolist() == sample.loss_mask
        assert all(map(torch.equal, found.states, tinystates.states_of(model, sample.input_ids)))
    assert list(arriving.iterdir()) == []


def test_a_run_that_broke_off_asks_only_for_the_rest(tmp_path, samples, model, folder):
    store = begun(Store(tmp_path / "store", "pt"), samples, folder)
    wanted = store.manifest()
    wanted = {key: wanted[key] for key in wanted if key not in ("layout", "samples")}
    broken = Extracting(model, tmp_path / "a", lambda number, tensors: tensors if number < 3 else (500, "engine died"))
    with peer(broken, tmp_path) as server, pytest.raises(KitError, match="the server answered 500: engine died"):
        extract(server, samples, hidden_states.missing(store, wanted, samples), store, in_flight=1)
    todo = hidden_states.missing(store, wanted, samples)
    assert todo == [3, 4, 5]
    before = store.path(1).stat().st_mtime_ns
    whole = Extracting(model, tmp_path / "b")
    with peer(whole, tmp_path) as server:
        extract(server, samples, todo, store)
    assert sorted(whole.asked) == sorted(samples[number].input_ids for number in todo)
    assert hidden_states.missing(store, wanted, samples) == [] and store.path(1).stat().st_mtime_ns == before
    assert all(map(torch.equal, store.read(4).states, tinystates.states_of(model, samples[4].input_ids)))


def test_new_layers_are_not_mixed_with_old_ones_when_a_run_breaks_off(tmp_path, samples, model, folder):
    store = tinystates.fill(Store(tmp_path / "store", "pt"), model, folder, samples)
    wanted = hidden_states.manifest(samples, tinystates.IDENTITY, [1, 4, 5], target.geometry(folder))
    assert hidden_states.missing(store, wanted, samples) == list(range(6))
    store.begin([sample.input_ids for sample in samples], [sample.loss_mask for sample in samples], wanted)
    # … and here the run is killed, before a single new sample came.
    assert hidden_states.missing(store, wanted, samples) == list(range(6))


def shortened(tensors):
    return tensors | {"hidden_states": tensors["hidden_states"][:, :3].contiguous()}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _, tensors: tensors | {"token_ids": tensors["token_ids"].flip(0)}, "sample 2: computed for other tokens"),
        (lambda _, tensors: {key: value[4:].clone() for key, value in tensors.items()}, "turn prefix caching off"),
        (lambda _, tensors: shortened(tensors), "3 states a token, 4 asked for"),
        (lambda _, tensors: tensors | {"hidden_states": tensors["hidden_states"] * float("nan")}, "NaN or infinite"),
        (lambda _, tensors: tensors | {"hidden_states": tensors["hidden_states"] * 0}, "state 0 of token 0 is all zero"),
        (lambda _, tensors: None, "the server left no whole file at .*is the disk full"),
        (lambda _, tensors: b"\x10\0\0\0\0\0\0\0{}", "the server left no whole file"),
    ],
)
def test_wrong_answers_are_refused_and_not_written(tmp_path, samples, model, folder, spoil, words):
    store = begun(Store(tmp_path / "store", "pt"), samples, folder)
    with peer(Extracting(model, tmp_path / "a", spoil), tmp_path) as server, pytest.raises(KitError, match=words):
        extract(server, samples, [2], store)
    assert not store.path(2).exists()
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("lost", [None, b"\x10\0\0\0\0\0\0\0{}"])
def test_states_that_do_not_come_are_asked_for_elsewhere(tmp_path, samples, model, folder, lost):
    """A server may answer and die before its file is whole; the last sample of all is asked for again, too."""
    store, said = begun(Store(tmp_path / "store", "pt"), samples, folder), []
    careless, whole = Extracting(model, tmp_path / "a", lambda number, tensors: lost), Extracting(model, tmp_path / "b")
    whole._one = careless._one  # one model computes for both
    with peer(careless, tmp_path) as one, peer(whole, tmp_path) as two:
        extract(Fleet([one, two], "0", 3, said.append), samples, list(range(6)), store, in_flight=1)
    assert [number for number in range(6) if not store.path(number).exists()] == []
    assert all(map(torch.equal, store.read(5).states, tinystates.states_of(model, samples[5].input_ids)))
    assert said and len(said) >= len(careless.asked) > 0 and "the server left no whole file at" in said[0]


def test_states_that_never_come_end_it_after_so_many_tries(tmp_path, samples, model, folder):
    store, said = begun(Store(tmp_path / "store", "pt"), samples, folder), []
    careless = Extracting(model, tmp_path / "a", lambda number, tensors: None)
    with peer(careless, tmp_path) as one, pytest.raises(KitError, match="sample 2 could not be written.*left no whole file"):
        extract(Fleet([one], "0", 2, said.append), samples, [2], store)
    assert len(careless.asked) == 3 and len(said) == 2


def test_a_folder_that_is_called_otherwise_here_is_read_by_its_name_here(tmp_path, samples, model, folder):
    """Servers of other people name files as they see them."""
    store, there = begun(Store(tmp_path / "store", "pt"), samples, folder), Extracting(model, tmp_path / "a")

    def elsewhere(body):
        said = there(body)
        path = Path(said["kv_transfer_params"]["hidden_states_path"])
        return {**said, "kv_transfer_params": {"hidden_states_path": f"/not/mounted/here/{path.name}"}}

    shared = {"states": STATES, "hidden_size": H, "in_flight": 1, "storage": tmp_path / "a"}
    with peer(elsewhere, tmp_path) as own:
        tokens = hidden_states.extract(replace(own, log=None), samples, [0], store, **shared)
        assert tokens == len(samples[0].input_ids) and list((tmp_path / "a").iterdir()) == []
        with pytest.raises(KitError, match="names /not/mounted/here/.*outside .*is another server answering"):
            hidden_states.extract(own, samples, [1], store, **shared)


def test_a_server_that_does_not_extract_is_told_apart(tmp_path, samples, folder):
    store = begun(Store(tmp_path / "store", "pt"), samples, folder)
    words = "no hidden states; is it extracting"
    with peer(lambda body: completion([5]), tmp_path) as server, pytest.raises(KitError, match=words):
        extract(server, samples, [0], store)


@pytest.mark.parametrize("layout", ["pt", "safetensors"])
def test_a_full_disk_costs_the_sample_in_flight_and_no_other(tmp_path, samples, model, folder, layout):
    store = begun(Store(tmp_path / "store", layout), samples, folder)
    numbers = list(range(len(samples)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arriving = tmp_path / "a"
    asking = Extracting(model, arriving)

    def write(path: Path, tensors) -> None:
        save_file(tensors, path)
        if path.name == "3.safetensors":  # as if others had filled the disk by then
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, hard))

    asking._write_later = write
    try:
        with peer(asking, tmp_path) as server, pytest.raises(KitError) as caught:
            extract(server, samples, numbers, store, in_flight=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = str(caught.value)
    assert said.startswith(f"sample 3 could not be written to {store.path(3)}: ") and "File too large" in said
    assert f"3 of {len(samples)} samples of this pass stand. Free space" in said
    whole = [number for number in numbers if store.holds(number, samples[number].input_ids)]
    assert whole == [0, 1, 2]
    assert sorted(path.name for path in store.path(0).parent.iterdir() if path.name.startswith(".")) == []
    with peer(Extracting(model, tmp_path / "b"), tmp_path) as server:
        extract(server, samples, [3, 4, 5], store)
    assert all(map(torch.equal, store.read(3).states, tinystates.states_of(model, samples[3].input_ids)))
