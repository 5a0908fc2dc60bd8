"""Where states arrive: in memory where there is room, and nothing left of it."""

import pytest

from eagle3kit import arriving, fleet, hidden_states, server
from eagle3kit.params import Params

needs_memory = pytest.mark.skipif(arriving.free() < 1 << 20, reason=f"no file system in memory at {arriving.MEMORY}")


def test_what_is_under_way_at_once():
    how = {"states": 4, "hidden_size": 8, "dtype": "float32"}
    assert arriving.at_once([100, 40, 7], in_flight=2, **how) == 2 * 100 * 4 * 8 * 4
    assert arriving.at_once([100], in_flight=64, **how) == 100 * 4 * 8 * 4
    assert arriving.at_once([], in_flight=64, **how) == 0


@needs_memory
def test_a_folder_in_memory_is_ours_alone_and_empty_again_for_the_next_run(tmp_path):
    folder = arriving.place(tmp_path, 1000)
    assert folder.parent == arriving.MEMORY and folder.stat().st_mode & 0o777 == 0o700
    other = arriving.place(tmp_path / "another", 1000)
    try:
        for one in (folder, other):
            (one / "left").write_bytes(b"by a run that was killed")
        assert arriving.place(tmp_path, 1000) == folder and list(folder.iterdir()) == []
        assert (other / "left").exists(), "another run's stays"
        assert arriving.place(tmp_path, 0) == tmp_path and not folder.exists(), "nothing will arrive, but what was left goes"
    finally:
        for one in (folder, other):
            arriving.remove(one)
    assert not folder.exists() and not other.exists()


@needs_memory
def test_too_much_for_memory_lies_in_the_runs_folder(tmp_path):
    assert arriving.place(tmp_path, arriving.free() * 2 + (1 << 30)) == tmp_path
    params = Params(hidden_states={"in_flight": 8})
    assert fleet.storage(params, tmp_path, 1 << 50) == tmp_path
    small = fleet.storage(params, tmp_path, 10)
    assert small.parent == arriving.MEMORY
    arriving.remove(small)


def test_a_folder_that_is_no_file_system_in_memory_is_not_used(tmp_path):
    assert arriving.free(tmp_path) == 0 and arriving.place(tmp_path / "own", 1, tmp_path) == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    mounts, groups = tmp_path / "mounts", tmp_path / "groups"
    mounts.write_text(f"none {tmp_path} tmpfs rw 0 0\n")
    groups.mkdir()
    monkeypatch.setattr(arriving, "MOUNTS", mounts)
    monkeypatch.setattr(arriving, "CGROUP", groups)
    assert arriving.free(tmp_path) > 0
    for limit, used, left in (("3000000", "1000000", 2_000_000), ("1000", "5000", 0)):
        (groups / "memory.max").write_text(limit)
        (groups / "memory.current").write_text(used)
        assert arriving.free(tmp_path) == left
    (groups / "memory.max").write_text("max\n")
    assert arriving.free(tmp_path) > 2_000_000
    (groups / "memory.max").write_text("3000000")
    (groups / "memory.current").write_text("0")
    folder = arriving.place(tmp_path / "own", 2_999_999, tmp_path)
    assert folder.parent == tmp_path and folder.is_dir()
    assert arriving.place(tmp_path / "own", 3_000_001, tmp_path) == tmp_path / "own"


def test_what_others_put_in_its_place_is_neither_used_nor_touched(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text(f"none {tmp_path} tmpfs rw 0 0\n")
    monkeypatch.setattr(arriving, "MOUNTS", tmp_path / "mounts")
    folder = arriving.place(tmp_path / "own", 1, tmp_path)
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    folder.symlink_to(tmp_path / "theirs")
    assert arriving.place(tmp_path / "own", 1, tmp_path) == tmp_path / "own"
    arriving.remove(folder, tmp_path)
    assert (tmp_path / "theirs" / "file").exists() and folder.is_symlink()
    arriving.remove(tmp_path / "theirs", tmp_path)
    assert (tmp_path / "theirs" / "file").exists(), "no name of ours"


@needs_memory
def test_the_folder_goes_with_its_server_however_that_ends(tmp_path):
    params = Params()
    folder = fleet.storage(params, tmp_path, 1000)
    settings = server.Settings(model="none", **hidden_states.server_options([1], 4, folder))
    with pytest.raises(RuntimeError, match="the reader fell over"), fleet.servers(params, settings, tmp_path / "log", print):
        (folder / "one.safetensors").touch()
        raise RuntimeError("the reader fell over")
    assert not folder.exists()
    own = tmp_path / "arriving"
    own.mkdir()
    settings = server.Settings(model="none", **hidden_states.server_options([1], 4, own))
    with fleet.servers(params, settings, tmp_path / "log", print):
        pass
    assert own.is_dir(), "the run's own folder is the stage's to empty"
