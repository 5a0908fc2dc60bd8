"""Rows become conversations or a named reason; which are used and on which side is decided by content alone."""

import itertools
import json

import datasets
import pytest

from eagle3kit import conversations, rows, sides, sources
from eagle3kit.conversations import Conversation, load, make_sample, read_samples, split, write_samples
from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit, check_row, check_tools
from eagle3kit.sides import Sides

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]}
RESULT = {"role": "tool", "content": "12 degrees", "tool_call_id": "c1"}
DECLARED = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def write(path, table):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(table), encoding="utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return str(path)


def chats(count, name="q"):
    return [{"messages": [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": f"a {i}"}]}
            for i in range(count)]


def test_both_shapes_of_row_give_the_same_messages():
    sharegpt = {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"},
                                  {"from": "gpt", "value": "Hello!"}]}
    assert check_row(sharegpt, False) == (SYSTEM, USER, ANSWER)
    assert check_row({"messages": [SYSTEM, USER, ANSWER]}, False) == (SYSTEM, USER, ANSWER)
    assert check_row({"messages": [SYSTEM, USER, ANSWER, USER]}, True) == (SYSTEM, USER, USER)
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    assert check_row({"messages": [parts, ANSWER]}, False) == (USER, ANSWER)
    assert check_row({"messages": [USER]}, True, "Be brief.") == (SYSTEM, USER)
    assert check_row({"messages": [SYSTEM, USER]}, True, "Another.") == (SYSTEM, USER)
    thought = ANSWER | {"reasoning_content": "Easy."}
    assert check_row({"messages": [USER, thought]}, False) == (USER, thought)


def test_calls_of_tools_are_read_with_their_results_and_declarations():
    asked = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]}, RESULT, ANSWER],
        "tools": json.dumps([DECLARED])}  # fmt: skip
    assert check_row(asked, False) == (USER, CALL, RESULT, ANSWER)
    assert check_tools(asked, False) == check_tools(asked | {"tools": [DECLARED]}, False) == (DECLARED,)
    assert check_tools({"messages": [USER]}, True) == check_tools({"messages": [USER], "tools": []}, True) == ()
    # The target's own calls would be others, and nobody could answer them.
    for check, row, field in ((check_row, asked, "messages[1].tool_calls"), (check_tools, asked, "tools")):
        with pytest.raises(Unfit, match="dataset.regenerate") as caught:
            check(row, True)
        assert caught.value.field == field
    for tools in ("[", "no list", {"a": 1}):
        with pytest.raises(Unfit, match="^tools: not"):
            check_tools({"tools": tools}, False)


def test_what_a_conversation_may_call_is_part_of_it(tmp_path):
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "tools": [DECLARED]}]
    loaded = load([write(tmp_path / "a.jsonl", rows)], 9, 0, False)
    assert sorted(conversation.tools for conversation in loaded.conversations) == [(), (DECLARED,)]
    assert loaded.counts[str(tmp_path / "a.jsonl")]["duplicates"] == 0


@pytest.mark.parametrize("row, field, reason", [
    ("text", "row", "a str"),
    ({"prompt": "x"}, "row", "neither messages nor conversations; it has prompt"),
    ({"messages": []}, "messages", "no turn"),
    ({"messages": ["x"]}, "messages[0]", "a str"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1]", "a turn of tool where assistant's is due"),
    ({"messages": [USER, CALL, USER, ANSWER]}, "messages[2]", "a turn of user where tool's is due"),
    ({"messages": [USER, CALL, RESULT, USER, ANSWER]}, "messages[3]", "a turn of user where tool or assistant's is due"),
    ({"messages": [USER | {"tool_calls": CALL["tool_calls"]}, ANSWER]}, "messages[0].tool_calls", "a turn of user calls tools"),
    ({"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[1].tool_calls[0].function.arguments", "not JSON"),
    ({"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "messages[1].tool_calls[0].function.arguments", "a list, not an object"),
    ({"messages": [USER, ANSWER | {"function_call": {"name": "f"}}]}, "messages[1].function_call", "older form"),
    ({"messages": [{"role": "developer", "content": "x"}, USER]}, "messages[0].role", "unknown role 'developer'"),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "function", "value": "x"}]},
     "conversations[1].from", "unknown role 'function'; known: human, gpt"),
    ({"messages": [USER, SYSTEM, ANSWER]}, "messages[1]", "a turn of system where assistant's is due"),
    ({"messages": [ANSWER, USER]}, "messages[0]", "a turn of assistant where user's is due"),
    ({"messages": [USER, USER, ANSWER]}, "messages[1]", "a turn of user where assistant's is due"),
    ({"messages": [SYSTEM]}, "messages", "no user turn"),
    ({"messages": [USER]}, "messages", "no assistant turn"),
    ({"messages": [USER, ANSWER, USER]}, "messages", "ends without the assistant's answer"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "messages[1].content", "an empty answer"),
    ({"messages": [{"role": "user", "content": None}, ANSWER]}, "messages[0].content", "a NoneType, not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "messages[0].content", "image_url"),
    ({"messages": [USER, ANSWER | {"tool_calls": [{}]}]}, "messages[1].tool_calls[0]", "no call of a function"),
])
def test_a_bad_row_names_its_field_and_reason(row, field, reason):
    with pytest.raises(Unfit) as caught:
        check_row(row, False)
    assert caught.value.field == field and reason in caught.value.reason


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_files_of_rows(tmp_path, suffix):
    loaded = load([write(tmp_path / f"chats{suffix}", chats(5))], 100, 0, False)
    assert sorted(c.messages[0]["content"] for c in loaded.conversations) == [f"q {i}" for i in range(5)]
    assert sorted(c.row for c in loaded.conversations) == [1, 2, 3, 4, 5] and loaded.rejected == []
    # A relative path means the place given, not the current folder.
    assert load([f"chats{suffix}"], 9, 0, False, base=tmp_path).conversations[0].id == loaded.conversations[0].id


def test_bad_rows_stop_the_load_unless_allowed(tmp_path):
    file = tmp_path / "chats.jsonl"
    write(file, [*chats(8), {"messages": [USER]}])
    with open(file, "a", encoding="utf-8") as more:
        more.write("\n{broken\n")
    with pytest.raises(KitError, match=r"2 of 10 rows \(20 %\).*chats.jsonl row 9, messages: no assistant turn; "
                                       r".*chats.jsonl row 11, line: not JSON"):
        load([str(file)], 100, 0, False)
    loaded = load([str(file)], 100, 0, False, allowed_bad_percent=20)
    assert len(loaded.conversations) == 8
    assert [(entry.row, entry.field) for entry in loaded.rejected] == [(9, "messages"), (11, "line")]
    assert loaded.counts[str(file)] == {"rows": 10, "unusable": 2, "duplicates": 0, "usable": 8, "used": 8}


def test_the_same_words_count_once(tmp_path):
    one, two = write(tmp_path / "one.jsonl", chats(4)), write(tmp_path / "two.json", chats(6))
    loaded = load([one, two, one], 100, 0, False)
    assert loaded.counts[one]["used"] == 4
    assert loaded.counts[two] == {"rows": 6, "unusable": 0, "duplicates": 4, "usable": 2, "used": 2}
    assert len({c.id for c in loaded.conversations}) == 6


def test_fewer_samples_are_a_subset_and_sources_take_turns(tmp_path):
    big, small = write(tmp_path / "big.jsonl", chats(300)), write(tmp_path / "small.jsonl", chats(3, "other"))
    many = load([big, small], 100, 5, False)
    assert (many.counts[big]["used"], many.counts[small]["used"]) == (97, 3)
    few = load([big, small], 10, 5, False)
    assert few.conversations == many.conversations[:10] and few.counts[small]["used"] == 3
    assert load([big, small], 10, 5, False) == few
    other = load([big, small], 10, 6, False)
    assert {c.id for c in other.conversations} != {c.id for c in few.conversations}


def test_regenerating_drops_the_answers(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER, USER, ANSWER]}, {"messages": [USER]}])
    loaded = load([file], 10, 0, True)
    assert sorted(len(c.messages) for c in loaded.conversations) == [1, 2]
    assert all(m["role"] == "user" for c in loaded.conversations for m in c.messages)


def test_no_such_source(tmp_path, monkeypatch):
    with pytest.raises(KitError, match="Did you mean mt-bench.*human-eval.*jsonl.*hub id"):
        load(["mt-bensh"], 1, 0, True)
    with pytest.raises(KitError, match=f"no file {tmp_path}/none.jsonl"):
        load(["none.jsonl"], 1, 0, True, base=tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(KitError, match=r"nobody/nothing \(split test\) cannot be had from the data hub.*bundled name"):
        load(["nobody/nothing:test"], 1, 0, True)


def test_hub_ids_go_through_datasets(tmp_path, monkeypatch):
    # The hub's loader takes a local folder of that name in the hub's place.
    (tmp_path / "owner" / "chats").mkdir(parents=True)
    write(tmp_path / "owner" / "chats" / "train.jsonl", chats(7))
    write(tmp_path / "owner" / "chats" / "test.jsonl", chats(3, "t"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded = load(["owner/chats", "owner/chats:test"], 100, 0, False)
    assert [count["used"] for count in loaded.counts.values()] == [7, 3]


def test_files_that_are_not_what_their_name_says(tmp_path):
    (tmp_path / "a.json").write_text('{"messages": []}\n{"messages": []}', encoding="utf-8")
    (tmp_path / "b.json").write_text('{"messages": []}', encoding="utf-8")
    (tmp_path / "c.parquet").write_bytes(b"PAR?")
    write(tmp_path / "d.parquet", [{"text": "x"}])
    for name, said in (("a.json", "jsonl"), ("b.json", "a dict"), ("c.parquet", "not a parquet"),
                       ("d.parquet", "text")):
        with pytest.raises(KitError, match=f"{name}.*{said}"):
            load([name], 1, 0, True, base=tmp_path)
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(KitError, match="no usable conversation"):
        load(["empty.jsonl"], 1, 0, True, base=tmp_path)


def test_bundled_sources():
    loaded = load(list(sources.BUNDLED), 10**6, 0, True)
    assert {name: count["rows"] for name, count in loaded.counts.items()} == {
        "mt-bench": 80, "human-eval": 164, "identity": 500, "chitchat": 3243, "chatterbot": 2026}
    assert len(loaded.rejected) == 2
    assert loaded.counts["mt-bench"]["used"] == 80 and loaded.counts["human-eval"]["used"] == 164
    bench = [c for c in loaded.conversations if c.source == "mt-bench"]
    assert all([m["role"] for m in c.messages] == ["user", "user"] for c in bench)
    with pytest.raises(KitError, match="80 of 80 rows.*set dataset.regenerate"):
        load(["mt-bench"], 10, 0, False)
    answered = load(["identity", "chitchat", "chatterbot"], 50, 0, False)
    assert all(c.messages[-1]["role"] == "assistant" for c in answered.conversations)


def opening(text, number=0):
    return Conversation(f"{text}{number}", "s", 1, ({"role": "user", "content": text},))


def test_split_follows_the_opening_alone():
    everything = [opening(f"question {i}", n) for i in range(400) for n in range(2)]
    train, held = split(everything, 10, 3)
    assert 40 < len(held) < 140 and len(train) + len(held) == 800
    assert not {c.messages[0]["content"] for c in train} & {c.messages[0]["content"] for c in held}
    # More conversations move nobody to the other side.
    few_train, few_held = split(everything[:200], 10, 3)
    assert {c.id for c in few_train} <= {c.id for c in train}
    assert {c.id for c in few_held} <= {c.id for c in held}
    assert split(everything, 10, 4)[1] != held


def test_split_ignores_spaces_case_and_system_turns():
    same = [opening("Hi there"), opening(" hi  THERE\n"),
            Conversation("x", "s", 1, (SYSTEM, {"role": "user", "content": "hi there"}))]
    others = [opening(f"other {i}") for i in range(20)]
    for seed in range(5):
        for side in split(same + others, 50, seed):
            assert len([c for c in side if c in same]) in (0, 3)


@pytest.mark.parametrize("seed", range(6))
def test_split_leaves_no_side_empty(seed):
    for percent in (0.1, 50):
        train, held = split([opening("a"), opening("b")], percent, seed)
        assert len(train) == len(held) == 1


def test_split_of_one_opening_is_impossible():
    for chats_alike in ([], [opening("a")], [opening("a", 1), opening("A", 2)]):
        with pytest.raises(KitError, match="cannot be split"):
            split(chats_alike, 10, 0)


def test_samples_come_back_as_they_were_written(tmp_path):
    samples = [make_sample("a", "s", [5, 6, 7, 8, 9], [(1, 2), (3, 5)]), make_sample("b", "t", [1, 2], [(1, 2)])]
    write_samples(tmp_path / "train.parquet", samples)
    assert read_samples(tmp_path / "train.parquet") == samples
    assert samples[0].loss_mask == [0, 1, 0, 1, 1]
    for spans in ([(1, 1)], [(0, 9)], [(2, 3), (1, 2)]):
        with pytest.raises(ValueError, match="does not fit 5 tokens"):
            make_sample("a", "s", [5, 6, 7, 8, 9], spans)


def test_a_broken_file_of_samples_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    with pytest.raises(KitError, match="02_dataset"):
        read_samples(path)
    path.write_bytes(b"nothing")
    with pytest.raises(KitError, match=r"train.parquet is no file of samples"):
        read_samples(path)
    good = make_sample("a", "s", [5, 6], [(1, 2)])
    write_samples(path, [good, conversations.Sample("b", "s", [5, 6], [1, 1], ((1, 2),))])
    with pytest.raises(KitError, match="row 2: ids, loss mask and turns do not fit"):
        read_samples(path)


def test_cutting_keeps_spans_and_mask_together():
    sample = make_sample("a", "s", list(range(10)), [(2, 4), (6, 9)])
    assert conversations.cut(sample, 10) is sample
    assert conversations.cut(sample, 7) == make_sample("a", "s", list(range(7)), [(2, 4), (6, 7)])
    assert conversations.cut(sample, 6) == make_sample("a", "s", list(range(6)), [(2, 4)])
    with pytest.raises(Unfit, match="first 2 tokens"):
        conversations.cut(sample, 2)


def test_share_of_bad_rows():
    bad = [rows.Rejected("s", 3, "f", "r")]
    rows.check_share(1, 100, bad, 1.0)
    with pytest.raises(KitError, match=r"1 of 99 rows \(1.01 %\).*s row 3, f: r"):
        rows.check_share(1, 99, bad, 1.0)


# ---- Rungs: the same sources, more and more samples


@pytest.mark.parametrize("percent", [2.0, 10.0, 50.0])
def test_what_a_small_rung_holds_out_never_trains_in_a_larger_one(tmp_path, percent):
    files = [write(tmp_path / "a.jsonl", chats(150)), write(tmp_path / "b.jsonl", chats(60, "other"))]
    for seed in range(4):
        for least in (1, 5):
            rungs = []
            for samples in (2, 3, 10, 11, 40, 150, 1000):
                taken = load(files, samples, seed, False, sides=Sides(percent, seed, least)).conversations
                assert len(taken) == len({c.id for c in taken}) == min(samples, 210)
                train, held = split(taken, percent, seed)
                assert train
                rungs.append(({c.id for c in train}, {c.id for c in held}))
            for train, held in rungs:
                assert len(held) >= min(least, (len(train) + len(held)) // 2, len(rungs[-1][1]))
            for (small_train, small_held), (train, held) in itertools.combinations(rungs, 2):
                assert not small_held & train and not small_train & held, "nobody changes sides"
                assert small_held <= held and small_train <= train, "a larger rung takes all of a smaller one"


def test_sides_leave_a_rung_alone_that_has_both(tmp_path):
    file = write(tmp_path / "a.jsonl", chats(300))
    for seed in range(3):
        plain = load([file], 200, seed, False)
        assert load([file], 200, seed, False, sides=Sides(10, seed)) == plain
    # Where the last ones give way the table of sources still adds up.
    found = load([file], 4, 0, False, sides=Sides(1, 0))
    assert found.counts[file]["used"] == len(found.conversations) == 4


def test_where_the_sources_have_nothing_on_a_side_every_rung_takes_the_same_group(tmp_path):
    file, seed = write(tmp_path / "a.jsonl", chats(30)), 0
    least = min(sides.share(sides.opening(c), seed) for c in load([file], 30, seed, False).conversations)
    percent = 99 * least  # just below the lowest: nobody is held out by their share
    held = [split(load([file], samples, seed, False, sides=Sides(percent, seed)).conversations, percent, seed)[1]
            for samples in (2, 5, 30)]
    assert held[0] == held[1] == held[2] and len(held[0]) == 1
