"""Files of hidden states: the bytes that safetensors writes, whole or not at all, and a reader that is not left waiting."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3kit import cache_slots, states_file, states_rooms, states_writer


def write(path, ids, states) -> int:
    """As a writer does, of tensors."""
    contents = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in (ids, states)]
    return states_file.write(str(path), states_file.header(len(ids), states.shape, str(states.dtype), states.nbytes), *contents)


@pytest.fixture
def room():
    """Two rooms of 40 tokens, as vLLM on a CPU has them; the first is taken."""
    rooms = states_rooms.Rooms(2, 40, torch.Size([4, 8]), torch.bfloat16, locked=False)
    taken = rooms.take()
    taken.states.copy_(torch.randn(40, 4, 8))
    yield rooms, taken
    os.close(rooms.file)


@pytest.fixture
def writer(room):
    one = states_writer.Writer(room[0].file)
    yield one
    one.stop()


def files(folder, room, lengths, row=4 * 8 * 2):
    """Consecutive requests of these many tokens in a room: (what is to be written, the tensors of each)."""
    asked, wanted, first = [], [], 0
    for number, length in enumerate(lengths):
        ids = torch.arange(length) + 1000 * number
        asked.append(states_writer.File(f"{folder}/{number}", ids.numpy().tobytes(), room.start + first * row, length * row))
        wanted.append({"hidden_states": room.states[first : first + length].clone(), "token_ids": ids})
        first += length
    return asked, wanted


def test_a_process_writes_what_lies_in_a_room(tmp_path, room, writer):
    asked, wanted = files(tmp_path / "new" / "folder", room[1], [7, 0, 30, 3])
    told = writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")
    for one, tensors in zip(asked, wanted, strict=True):
        save_file(tensors, tmp_path / "wanted")
        with open(one.path, "rb") as found:
            assert found.read() == (tmp_path / "wanted").read_bytes()
    assert told["files"] == 4 and told["failed"] == {}
    assert told["bytes"] == sum(os.path.getsize(one.path) for one in asked)
    assert min(told["create_s"], told["fill_s"], told["name_s"]) > 0
    assert room[0].in_use() == 1


def test_what_a_process_cannot_write_is_told_to_both_sides(tmp_path, room, writer):
    asked, _ = files(tmp_path, room[1], [7, 5])
    (tmp_path / "0.part").mkdir()  # in the way of the first
    told = writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")
    assert told["files"] == 1 and list(told["failed"]) == [asked[0].path] and "directory" in told["failed"][asked[0].path]
    with pytest.raises(OSError, match="directory"):
        states_file.wait_for(tmp_path / "0", 60)


def test_a_process_that_dies_leaves_notes_and_another_takes_its_place(tmp_path, room, writer):
    asked, _ = files(tmp_path, room[1], [7, 5])
    writer.write(asked[:1], room[1].states.shape[1:], "torch.bfloat16")
    os.kill(writer._child.pid, signal.SIGKILL)
    writer._child.wait()
    (tmp_path / "1.part").write_bytes(b"half a file")
    told = writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")
    assert told["files"] == 1 and list(told["failed"]) == [asked[1].path], "the first one was written before"
    with pytest.raises(OSError, match="the process that writes hidden states died"):
        states_file.wait_for(tmp_path / "1", 60)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")["files"] == 2


def test_a_process_outlives_what_is_meant_for_the_engine_but_not_the_engine(tmp_path, room, writer):
    asked, _ = files(tmp_path, room[1], [7])
    writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")
    child = writer._child
    for each in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(each)
    assert writer.write(asked, room[1].states.shape[1:], "torch.bfloat16")["files"] == 1 and writer._child is child
    child.stdin.close()  # as when the engine is killed
    assert child.wait(60) == 0
    child.stdout.close()
    writer._child = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 4, 8), (1, 1, 3), (0, 4, 8), (700, 2, 5)])
def test_the_bytes_are_those_of_safetensors(tmp_path, dtype, shape):
    states, ids = torch.randn(shape).to(dtype), torch.arange(shape[0]) * 7
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "wanted")
    size = write(tmp_path / "found", ids, states)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert size == (tmp_path / "wanted").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found", "wanted"]


def test_a_part_of_a_larger_room_is_written_alone(tmp_path):
    room = torch.randn(100, 4, 8)
    save_file({"hidden_states": room[30:41].clone(), "token_ids": torch.arange(11)}, tmp_path / "wanted")
    write(tmp_path / "found", torch.arange(11), room[30:41])
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_disk_that_takes_a_little_at_a_time_gets_all_of_it(tmp_path, monkeypatch):
    whole = os.writev

    def little(file, parts):
        return whole(file, [parts[0][:1000]])

    states = torch.randn(50, 4, 8)
    write(tmp_path / "wanted", torch.arange(50), states)
    monkeypatch.setattr(os, "writev", little)
    write(tmp_path / "found", torch.arange(50), states)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_full_disk_leaves_a_note_and_nothing_else(tmp_path):
    path = tmp_path / "gone" / "x.safetensors"
    with pytest.raises(OSError):
        write(path, torch.arange(2), torch.randn(2, 1, 4))
    path.parent.mkdir()
    states_file.give_up(str(path), OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device"):
        states_file.wait_for(path, 60)
    assert list(path.parent.iterdir()) == [], "the note is taken with the news"


def test_a_reader_waits_for_the_name_and_no_longer_than_it_said(tmp_path):
    path = tmp_path / "late"
    writer = threading.Timer(0.05, write, (path, torch.arange(2), torch.ones(2, 1, 4)))
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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_shares_are_consecutive_and_fair(lengths, count):
    runs = cache_slots.shares(lengths, count)
    assert [at for first, after in runs for at in range(first, after)] == list(range(len(lengths)))
    assert len(runs) <= count and all(first < after for first, after in runs)
    fair = (sum(lengths) + len(lengths)) / count
    assert all(sum(lengths[first:after]) <= fair + max(lengths) for first, after in runs)


def test_shares_of_four():
    assert cache_slots.shares([3, 1, 4, 4], 2) == [(0, 3), (3, 4)]
