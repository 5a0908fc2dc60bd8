"""Samples on disk: what is written is what is read, by us and by speculators, and nothing in a file is ever run."""

import pickle
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3kit import draft, samples
from eagle3kit.errors import KitError
from eagle3kit.samples import StatesSample, Store, anatomy, load, open_store

LAYOUTS = ("pt", "safetensors")
H, STATES = 16, 4


def some_sample(seed: int, length: int = 20, dtype: torch.dtype = torch.float32) -> StatesSample:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, STATES, H, generator=generator).to(dtype)
    ids = torch.randint(500, (length,), generator=generator)
    return StatesSample(ids, (torch.arange(length) % 3 > 0).long(), list(states.unbind(1)))


def store_of(folder: Path, layout: str, count: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Store, list[StatesSample]]:
    rows = [some_sample(seed, 20 + seed, dtype) for seed in range(count)]
    store = Store(folder, layout)
    store.begin([row.input_ids.tolist() for row in rows], [row.loss_mask.tolist() for row in rows], {"layers": [1, 2, 3]})
    for number, row in enumerate(rows):
        store.write(number, row)
    return store, rows


def same(one: StatesSample, other: StatesSample) -> bool:
    return (
        torch.equal(one.input_ids, other.input_ids)
        and torch.equal(one.loss_mask, other.loss_mask)
        and len(one.states) == len(other.states)
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.states, other.states, strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read_bit_for_bit(tmp_path, layout, dtype):
    store, rows = store_of(tmp_path / "s", layout, dtype=dtype)
    assert all(same(open_store(tmp_path / "s").read(number), row) for number, row in enumerate(rows))
    assert store.manifest() == {"layers": [1, 2, 3], "layout": layout, "samples": 3}
    left = [path for path in (tmp_path / "s").rglob("*") if path.name.startswith(".")]
    assert left == []


def test_a_pt_file_has_the_three_keys_and_nothing_else(tmp_path):
    store, rows = store_of(tmp_path, "pt")
    # The states of one sample are slices of a larger tensor: none may drag all of it into the file.
    wide = torch.stack([*rows[1].states, *10 * [torch.ones(21, H)]], dim=1)
    store.write(1, StatesSample(rows[1].input_ids, rows[1].loss_mask, list(wide[:, :STATES].unbind(1))))
    assert [path.name for path in sorted(tmp_path.glob("*.pt"))] == ["data_0.pt", "data_1.pt", "data_2.pt"]
    content = torch.load(tmp_path / "data_1.pt", weights_only=True)
    assert list(content) == ["input_ids", "loss_mask", "hidden_states"]
    assert content["input_ids"].dtype == content["loss_mask"].dtype == torch.int64
    assert isinstance(content["hidden_states"], list) and [s.shape for s in content["hidden_states"]] == [(21, H)] * STATES
    bare = 4 * STATES * H * 21
    assert store.path(1).stat().st_size < 1.5 * bare + 4096
    assert same(rows[1], StatesSample(content["input_ids"], content["loss_mask"], content["hidden_states"]))


def test_a_safetensors_file_is_as_speculators_writes_it(tmp_path):
    _, rows = store_of(tmp_path, "safetensors")
    content = load_file(tmp_path / "hidden_states" / "hs_2.safetensors")
    assert sorted(content) == ["hidden_states", "token_ids"]
    assert torch.equal(content["hidden_states"], torch.stack(rows[2].states, dim=1))
    assert torch.equal(content["token_ids"], rows[2].input_ids)


def test_speculators_own_reader_gives_the_same_tensors(tmp_path):
    from speculators.train.data import ArrowDataset

    store, rows = store_of(tmp_path / "st", "safetensors")
    plain, _ = store_of(tmp_path / "pt", "pt")
    theirs = ArrowDataset(64, store.folder, on_missing="raise", hidden_states_dtype=torch.float32)
    assert len(theirs) == len(rows) and theirs.approx_lengths == [len(row.input_ids) for row in rows]
    for mine in (store, plain):
        mine.begin([row.input_ids.tolist() for row in rows], [row.loss_mask.tolist() for row in rows],
                   {"lengths": [len(row.input_ids) for row in rows], "layers": [1, 2, 3]})
        ours = draft.dataset(mine, max_length=64, dtype=torch.float32)
        assert ours.approx_lengths == theirs.approx_lengths
        for number in range(len(rows)):
            one, other = ours[number], theirs[number]
            assert sorted(one) == sorted(other)
            assert all(torch.equal(one[key], other[key]) for key in one), f"{mine.layout} {number}"


def test_anatomy_lists_every_tensor(tmp_path):
    store, _ = store_of(tmp_path, "pt")
    rows = anatomy(store.path(0))
    assert [row["key"] for row in rows] == ["input_ids", "loss_mask", *(f"hidden_states[{k}]" for k in range(STATES))]
    assert rows[0] == {"key": "input_ids", "shape": [20], "dtype": "int64", "bytes": 160}
    assert rows[-1] == {"key": "hidden_states[3]", "shape": [20, H], "dtype": "float32", "bytes": 20 * H * 4}


# ---- Files that are not what they should be


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_file_with_code_in_it_is_refused_and_the_code_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    inside, bare = tmp_path / "inside.pt", tmp_path / "bare.pt"
    torch.save({"input_ids": Trap(mark), "loss_mask": torch.ones(1), "hidden_states": []}, inside)
    bare.write_bytes(pickle.dumps({"input_ids": Trap(mark)}))
    for path in (inside, bare):
        with pytest.raises(KitError) as caught:
            load(path)
        assert str(path) in str(caught.value) and "not a tensor file" in str(caught.value)
    assert not mark.exists()
    pickle.loads(bare.read_bytes())  # the trap itself works
    assert mark.exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_short_is_named_and_does_not_count(tmp_path, layout):
    store, rows = store_of(tmp_path, layout)
    whole = store.path(1).read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        store.path(1).write_bytes(whole[:length])
        with pytest.raises(KitError) as caught:
            store.read(1)
        assert str(store.path(1)) in str(caught.value) and "03_hidden_states" not in str(caught.value).split(":")[0]
        assert not store.holds(1, rows[1].input_ids.tolist())
    store.path(1).unlink()
    with pytest.raises(KitError, match="does not exist"):
        store.read(1)
    store.write(1, rows[1])
    assert same(store.read(1), rows[1])


def test_a_key_or_a_shape_that_is_wrong_is_named(tmp_path):
    store, rows = store_of(tmp_path, "pt")
    states = [state.clone() for state in rows[0].states]
    good = {"input_ids": rows[0].input_ids, "loss_mask": rows[0].loss_mask, "hidden_states": states}
    for change, words in (
        ({"hidden_states": [states[0], states[1][:-1].clone()]}, r"key hidden_states\[1\]: expected \[20, H\]"),
        ({"hidden_states": [states[0].flatten()]}, r"key hidden_states\[0\]"),
        ({"loss_mask": rows[0].loss_mask[1:].clone()}, r"key loss_mask: \[19\] beside \[20\]"),
    ):
        torch.save(good | change, store.path(0))
        with pytest.raises(KitError, match=words) as caught:
            store.read(0)
        assert "data_0.pt" in str(caught.value)
    torch.save({key: good[key] for key in ("input_ids", "hidden_states")}, store.path(0))
    with pytest.raises(KitError, match=r"data_0\.pt lacks the key loss_mask \(it has input_ids, hidden_states\)"):
        store.read(0)
    torch.save(rows[0].input_ids, store.path(0))
    with pytest.raises(KitError, match="lacks the key"):
        store.read(0)


def test_states_of_another_run_beside_the_data_set_are_noticed(tmp_path):
    store, rows = store_of(tmp_path, "safetensors")
    save_file({"hidden_states": torch.stack(rows[0].states, dim=1), "token_ids": rows[0].input_ids}, store.path(1))
    with pytest.raises(KitError, match=r"hs_1\.safetensors, key token_ids: not the tokens of row 1"):
        store.read(1)
    save_file({"hidden_states": torch.stack(rows[0].states, dim=1)}, store.path(1))
    with pytest.raises(KitError, match=r"hs_1\.safetensors lacks the key token_ids"):
        store.read(1)


def test_samples_without_a_manifest_are_nobodys(tmp_path):
    store, _ = store_of(tmp_path, "pt")
    (tmp_path / "manifest.json").write_text('{"layers": [1')
    with pytest.raises(KitError, match=r"manifest\.json is not JSON"):
        open_store(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(KitError, match="nobody knows what these samples were made from"):
        open_store(tmp_path)


# ---- What is there already


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_a_whole_sample_of_these_tokens_is_held(tmp_path, layout):
    store, rows = store_of(tmp_path, layout)
    ids, mask = rows[1].input_ids.tolist(), rows[1].loss_mask.tolist()
    assert store.holds(1, ids) and store.holds(1, ids, mask)
    assert not store.holds(1, ids[:-1]) and not store.holds(1, [*ids, 0]) and not store.holds(1, ids[::-1])
    assert not store.holds(0, ids) and not store.holds(3, ids)


def test_a_mask_of_before_is_not_held(tmp_path):
    store, rows = store_of(tmp_path, "pt")
    assert not store.holds(1, rows[1].input_ids.tolist(), [1] * 21)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_safetensors_folder_can_be_begun_again(tmp_path, layout):
    store, rows = store_of(tmp_path, layout)
    tokens = [row.input_ids.tolist() for row in rows[:2]]
    store.begin(tokens, [[1] * len(ids) for ids in tokens], {"layers": [1, 2, 3]})
    assert store.manifest()["samples"] == 2
    assert all(store.holds(number, row.input_ids.tolist()) for number, row in enumerate(rows))
    if layout == "safetensors":  # there the mask is the data set's
        assert store.read(1).loss_mask.tolist() == [1] * 21
        assert len(store.dataset()) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_made_otherwise_go_before_the_new_manifest_comes(tmp_path, layout):
    """Else a run that is killed between the two would take them for its own: the tokens are the same."""
    store, rows = store_of(tmp_path, layout)
    tokens, masks = [row.input_ids.tolist() for row in rows], [row.loss_mask.tolist() for row in rows]
    store.begin(tokens, masks, {"layers": [1, 2, 4]})
    assert not any(store.holds(number, ids) for number, ids in enumerate(tokens))
    other = Store(tmp_path, "safetensors" if layout == "pt" else "pt")
    for number, row in enumerate(rows):
        store.write(number, row)
    other.begin(tokens, masks, {"layers": [1, 2, 4]})
    other.begin(tokens, masks, {"layers": [1, 2, 5]})
    store.begin(tokens, masks, {"layers": [1, 2, 5]})
    assert not any(store.holds(number, ids) for number, ids in enumerate(tokens))


# ---- A full disk


@pytest.fixture
def room():
    """A function that says how many bytes a file may have from now on: a disk that is full at that point."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_that_finds_no_room_leaves_nothing_half_done(tmp_path, layout, room):
    store, rows = store_of(tmp_path, layout)
    store.write(3, some_sample(9, 200))
    whole = store.path(3).stat().st_size
    store.path(3).unlink()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    for size in [*range(0, whole - 1, whole // 40), whole - 1]:
        for number in (3, 1):
            room(size)
            with pytest.raises(OSError, match="File too large"):
                store.write(number, some_sample(9, 200))
            room(None)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before
    assert all(same(store.read(number), row) for number, row in enumerate(rows))


def test_a_full_file_system_is_an_error_of_the_system_too(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.strip()}")
    try:
        for layout in LAYOUTS:
            store, rows = store_of(disk / layout, layout)
            with pytest.raises(OSError, match="No space left on device"):
                store.write(3, some_sample(9, 5000))
            assert all(same(store.read(number), row) for number, row in enumerate(rows))
            assert not store.path(3).exists() and not list(store.path(3).parent.glob(".*"))
    finally:
        samples._opened.cache_clear()  # a data set that is open holds the disk
        subprocess.run(["umount", disk], check=True)
