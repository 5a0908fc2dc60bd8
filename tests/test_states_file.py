"""Files of hidden states: the bytes that safetensors writes, whole or not at all, and a reader that is not left waiting."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3kit import cache_slots, states_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 4, 8), (1, 1, 3), (0, 4, 8), (700, 2, 5)])
def test_the_bytes_are_those_of_safetensors(tmp_path, dtype, shape):
    states, ids = torch.randn(shape).to(dtype), torch.arange(shape[0]) * 7
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "wanted")
    size = states_file.write(str(tmp_path / "found"), ids, states)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert size == (tmp_path / "wanted").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found", "wanted"]


def test_a_part_of_a_larger_room_is_written_alone(tmp_path):
    room = torch.randn(100, 4, 8)
    save_file({"hidden_states": room[30:41].clone(), "token_ids": torch.arange(11)}, tmp_path / "wanted")
    states_file.write(str(tmp_path / "found"), torch.arange(11), room[30:41])
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_disk_that_takes_a_little_at_a_time_gets_all_of_it(tmp_path, monkeypatch):
    whole = os.writev

    def little(file, parts):
        return whole(file, [parts[0][:1000]])

    states = torch.randn(50, 4, 8)
    states_file.write(str(tmp_path / "wanted"), torch.arange(50), states)
    monkeypatch.setattr(os, "writev", little)
    states_file.write(str(tmp_path / "found"), torch.arange(50), states)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_full_disk_leaves_a_note_and_nothing_else(tmp_path):
    path = tmp_path / "gone" / "x.safetensors"
    with pytest.raises(OSError):
        states_file.write(str(path), torch.arange(2), torch.randn(2, 1, 4))
    path.parent.mkdir()
    states_file.give_up(str(path), OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device"):
        states_file.wait_for(path, 60)
    assert list(path.parent.iterdir()) == [], "the note is taken with the news"


def test_a_reader_waits_for_the_name_and_no_longer_than_it_said(tmp_path):
    path = tmp_path / "late"
    writer = threading.Timer(0.05, states_file.write, (str(path), torch.arange(2), torch.ones(2, 1, 4)))
    writer.start()
    states_file.wait_for(path, 60)
    assert path.stat().st_size > 0
    writer.join()
    with pytest.raises(OSError, match="did not come within 0 s"):
        states_file.wait_for(tmp_path / "never", 0.01)
    with pytest.raises(OSError, match="its server died before it wrote it"):
        states_file.wait_for(tmp_path / "never", 60, lambda: False)


SIZE = 4


def pending(lengths):
    """Requests of these many tokens, their blocks scattered over a cache."""
    free = iter(torch.randperm(400, generator=torch.Generator().manual_seed(sum(lengths))).tolist())
    return [SimpleNamespace(token_ids=torch.arange(n), block_ids=[next(free) for _ in range(-(-n // SIZE) + n % 2)])
            for n in lengths]  # fmt: skip  (one block more than is used, now and then)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(40, 90))
def test_a_step_is_gathered_in_order_and_in_bounds(lengths, most):
    cache = torch.arange(400 * SIZE)
    saves = pending(lengths)
    groups = cache_slots.grouped(saves, most)
    assert [save for group in groups for save in group] == saves
    assert all(sum(len(save.token_ids) for save in group) <= most for group in groups)
    for group in groups:
        one_by_one = [cache[block * SIZE + offset] for save in group for token in range(len(save.token_ids))
                      for block, offset in [(save.block_ids[token // SIZE], token % SIZE)]]  # fmt: skip
        assert cache[cache_slots.slots(group, SIZE)].tolist() == [int(value) for value in one_by_one]


def test_slots_of_two_blocks():
    assert cache_slots.slots([SimpleNamespace(token_ids=torch.arange(6), block_ids=[7, 2])], 4).tolist() == [28, 29, 30, 31, 8, 9]
