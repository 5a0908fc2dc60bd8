"""Files of hidden states: the bytes that safetensors writes, whole or not at all, and a reader that is not left waiting."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from types import SimpleNamespace

import psutil
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
def rooms():
    """Two rooms of 40 tokens, as vLLM on a CPU has them, full of states."""
    found = states_rooms.Rooms(2, 40, torch.Size([4, 8]), torch.bfloat16, locked=False)
    for room in found.free:
        room.states.copy_(torch.randn(40, 4, 8))
    yield found
    found.close()


@pytest.fixture
def writers(rooms):
    every = states_writer.Writers(2, rooms.file, rooms.layout)
    yield every
    every.stop()


def files(folder, room, lengths):
    """Consecutive requests of these many tokens in a room: (what is to be written, the tensors of each)."""
    asked, wanted, first = [], [], 0
    for number, length in enumerate(lengths):
        ids = torch.arange(length) + 1000 * number
        asked.append(states_writer.File(f"{folder}/{number}", first, length, array("I", ids.tolist()).tobytes()))
        wanted.append({"hidden_states": room.states[first : first + length].clone(), "token_ids": ids})
        first += length
    return asked, wanted


def the_one(writers):
    """What became of the one list that is under way."""
    (told,) = writers.receive(60)
    assert writers.receive(60) == [] and writers.under_way() == 0, "nothing is left to wait for"
    return told


def test_processes_write_what_lies_in_the_rooms_once_the_flag_says_so(tmp_path, rooms, writers):
    every = {room.number: files(tmp_path / f"new-{room.number}" / "folder", room, [7, 0, 30, 3]) for room in rooms.free}
    for room in rooms.free:
        asked, _ = every[room.number]
        writers.send(0, room, 5, asked[:2])
        writers.send(1, room, 5, asked[2:])
    assert writers.receive() == [] and list(tmp_path.iterdir()) == [], "the flags do not say that the states are there"
    late, soon = rooms.free
    soon.flag.fill_(4)
    time.sleep(0.05)
    assert list(tmp_path.iterdir()) == [], "that was another flag"
    late.flag.fill_(5)
    soon.flag.fill_(5)
    told = []
    while len(told) < 4:
        told += writers.receive(60)
    for asked, wanted in every.values():
        for one, tensors in zip(asked, wanted, strict=True):
            save_file(tensors, tmp_path / "wanted")
            with open(one.path, "rb") as found:
                assert found.read() == (tmp_path / "wanted").read_bytes()
    assert sum(one.files for one in told) == 8 and sum(one.failed for one in told) == 0
    assert sum(one.bytes for one in told) == sum(os.path.getsize(one.path) for asked, _ in every.values() for one in asked)
    assert min(min(one.create_s, one.fill_s, one.name_s) for one in told) > 0
    assert sorted(one.room.number for one in told) == [0, 0, 1, 1]


def test_what_a_process_cannot_write_is_told_to_both_sides(tmp_path, rooms, writers):
    room = rooms.free.pop()
    asked, _ = files(tmp_path, room, [7, 5])
    (tmp_path / "0.part").mkdir()  # in the way of the first
    room.flag.fill_(1)
    writers.send(0, room, 1, asked)
    told = the_one(writers)
    assert (told.room, told.files, told.failed) == (room, 1, 1)
    with pytest.raises(OSError, match="directory"):
        states_file.wait_for(tmp_path / "0", 60)


@pytest.mark.parametrize("when", ["idle", "at work"])
def test_a_process_that_dies_leaves_notes_and_another_takes_its_place(tmp_path, rooms, writers, when, capsys):
    room = rooms.free.pop()
    asked, _ = files(tmp_path, room, [7, 5])
    room.flag.fill_(1)
    writers.send(0, room, 1, asked[:1])
    assert the_one(writers).files == 1
    (tmp_path / "1.part").write_bytes(b"half a file")
    child = writers._children[0]
    if when == "idle":
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        writers.send(0, room, 1, asked)
        assert the_one(writers).files == 2
        return
    writers.send(0, room, 2, asked)  # it waits for the flag
    os.kill(child.pid, signal.SIGKILL)
    told = the_one(writers)
    assert (told.room, told.files, told.failed) == (room, 1, 1), "the first one was written before"
    assert "the process that writes hidden states died (code -9)" in capsys.readouterr().err
    with pytest.raises(OSError, match="the process that writes hidden states died"):
        states_file.wait_for(tmp_path / "1", 60)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    writers.send(0, room, 1, asked)
    assert the_one(writers).files == 2 and writers._children[0] is not child


def test_what_was_told_is_not_lost_with_its_process(tmp_path, rooms, writers):
    """The reader may have taken the file by then: a note would be of nothing."""
    room = rooms.free.pop()
    asked, _ = files(tmp_path, room, [7])
    room.flag.fill_(1)
    writers.send(0, room, 1, asked)
    assert select.select([writers._heard], [], [], 60)[0], "it has told"
    (tmp_path / "0").unlink()
    os.kill(writers._children[0].pid, signal.SIGKILL)
    writers._watchers[0].join()
    told = the_one(writers)
    assert (told.files, told.failed) == (1, 0) and list(tmp_path.iterdir()) == []


def test_a_list_is_told_of_even_where_no_note_can_be_left(tmp_path, rooms, writers):
    room = rooms.free.pop()
    asked, _ = files(tmp_path / "nowhere", room, [7, 5])
    writers.send(0, room, 1, asked)
    os.kill(writers._children[0].pid, signal.SIGKILL)
    told = the_one(writers)
    assert (told.room, told.files, told.failed) == (room, 0, 2) and list(tmp_path.iterdir()) == []
    long = [states_writer.File(f"{tmp_path}/{'x' * 252}", 0, 7, asked[0].token_ids)]
    room.flag.fill_(1)
    writers.send(0, room, 1, long)
    assert the_one(writers).failed == 1


def test_a_process_outlives_what_is_meant_for_the_engine(tmp_path, rooms, writers):
    room = rooms.free.pop()
    asked, _ = files(tmp_path, room, [7])
    room.flag.fill_(1)
    writers.send(0, room, 1, asked)
    the_one(writers)
    child = writers._children[0]
    for each in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(each)
    writers.send(0, room, 1, asked)
    assert the_one(writers).files == 1 and writers._children[0] is child


def test_what_was_sent_is_written_before_the_end(tmp_path, rooms):
    room = rooms.free.pop()
    asked, _ = files(tmp_path, room, [7, 5])
    writers = states_writer.Writers(1, rooms.file, rooms.layout)
    for one in asked:
        writers.send(0, room, 1, [one])
    threading.Timer(0.2, room.flag.fill_, (1,)).start()
    assert [(told.files, told.failed) for told in writers.stop()] == [(1, 0), (1, 0)]
    assert writers._children[0].returncode == 0 and sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_states_that_never_come_are_given_up_at_the_end(tmp_path, rooms):
    room = rooms.free.pop()
    writers = states_writer.Writers(1, rooms.file, rooms.layout)
    writers.send(0, room, 1, files(tmp_path, room, [7])[0])
    assert [(told.files, told.failed) for told in writers.stop(patience_s=0.5)] == [(0, 1)]
    with pytest.raises(OSError, match="the process that writes hidden states died"):
        states_file.wait_for(tmp_path / "0", 60)


def test_processes_speak_in_the_engines_log_and_go_with_it_when_it_is_killed(tmp_path):
    """Whatever they wait for then: a list, or the flag of a room."""
    (tmp_path / "x.part").mkdir()  # in the way
    lines = ["import time, torch", "from eagle3kit import states_rooms, states_writer",
             "rooms = states_rooms.Rooms(1, 8, torch.Size([1, 4]), torch.float32, locked=False)",
             "writers, room = states_writer.Writers(2, rooms.file, rooms.layout), rooms.free[0]",
             f"asked = [states_writer.File({str(tmp_path / 'x')!r}, 0, 8, bytes(32))]",
             "room.flag.fill_(1)", "writers.send(0, room, 1, asked)", "print(writers.receive(60)[0].failed, flush=True)",
             "writers.send(0, room, 2, asked)", "print('waiting', flush=True)", "time.sleep(600)"]  # fmt: skip
    with open(tmp_path / "log", "wb") as log:
        engine = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, stderr=log)
    with engine:
        assert [engine.stdout.readline() for _ in range(2)] == [b"1\n", b"waiting\n"]
        children = psutil.Process(engine.pid).children()
        assert len(children) == 2
        engine.kill()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert f"Hidden states were not written to {tmp_path / 'x'}: [Errno 21]" in (tmp_path / "log").read_text()


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
    return [SimpleNamespace(tokens=n, block_ids=[next(free) for _ in range(-(-n // SIZE) + n % 2)])
            for n in lengths]  # fmt: skip  (one block more than is used, now and then)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(40, 90))
def test_a_step_is_gathered_in_order_and_in_bounds(lengths, most):
    cache = torch.arange(400 * SIZE)
    saves = pending(lengths)
    groups = cache_slots.grouped(saves, most)
    assert [save for group in groups for save in group] == saves
    assert all(sum(save.tokens for save in group) <= most for group in groups)
    for group in groups:
        one_by_one = [cache[block * SIZE + offset] for save in group for token in range(save.tokens)
                      for block, offset in [(save.block_ids[token // SIZE], token % SIZE)]]  # fmt: skip
        assert cache[cache_slots.slots(group, SIZE)].tolist() == [int(value) for value in one_by_one]


def test_slots_of_two_blocks():
    assert cache_slots.slots([SimpleNamespace(tokens=6, block_ids=[7, 2])], 4).tolist() == [28, 29, 30, 31, 8, 9]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_shares_are_consecutive_and_fair(lengths, count):
    runs = cache_slots.shares(lengths, count)
    assert [at for first, after in runs for at in range(first, after)] == list(range(len(lengths)))
    assert len(runs) <= count and all(first < after for first, after in runs)
    fair = (sum(lengths) + len(lengths)) / count
    assert all(sum(lengths[first:after]) <= fair + max(lengths) for first, after in runs)


def test_shares_of_four():
    assert cache_slots.shares([3, 1, 4, 4], 2) == [(0, 3), (3, 4)]
