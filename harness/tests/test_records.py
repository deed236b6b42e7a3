"""Rows survive the trip through the file unchanged, and every damage is named."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest

from harness import codec, records
from harness.records import Difference, Parity, RecordedTree, Row, Timing
from harness.tests.examples import make_environment, make_row


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def full_row() -> Row:
    tree = RecordedTree("p|1\n", 3, (5, 7), (" x", "\u2028µ😀"), (-1, 0), (0, 1), (0.0, -0.25), (0, 1), 9, "\x00")
    difference = Difference("tokens", "p1", 2, 17, 42, 43, 2**63, 1e-3)
    return make_row(
        parity=Parity("ar", 24, 0, 1, difference, "divergence-1.kdtr"),
        params={"commit": "1234e567", "budget": 64, "graph": True, "temperature": 0.0, "none": None, "text": "nan"},
        timing=Timing("wall", "staged", (0.1, 0.2), 0.5, 1, True),
        stages={"draft": 0.05, "other": 0.01},
        depth_histogram=(1, 2, 3),
        trees=(tree,),
    )


def test_round_trip_keeps_every_value_and_type():
    row = full_row()
    again = records.from_json(records.to_json(row))
    assert again == row
    assert type(again.params["graph"]) is bool
    assert type(again.params["temperature"]) is float
    assert again.params["commit"] == "1234e567"
    assert records.to_json(row).isascii()
    assert "\n" not in records.to_json(row)


@pytest.mark.parametrize(("value", "reason"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "-infinite")])
def test_a_number_that_json_cannot_hold_is_null_with_a_reason(value, reason):
    row = make_row(metrics={"tau": value, "n": 1}, timing=Timing("wall", "e2e", (1.0, value), value, 0, False))
    plain = strict(records.to_json(row))
    assert plain["metrics"] == {"tau": None, "n": 1}
    assert plain["timing"]["samples_s"] == [1.0, None]
    assert plain["nulls"] == dict.fromkeys(("metrics.tau", "timing.samples_s[1]", "timing.warmup_s"), reason)
    assert records.from_json(records.to_json(row)) == row


def test_non_finite_is_refused_where_null_has_no_meaning():
    with pytest.raises(codec.FieldError, match=r"params\.temperature.*finite|found nan"):
        codec.fit(dict[str, float], {"temperature": math.nan}, "params")


def test_an_absent_number_needs_a_reason():
    with pytest.raises(codec.FieldError, match=r"metrics\.ttft_s"):
        make_row(metrics={"ttft_s": None})
    row = make_row(metrics={"ttft_s": None}, nulls={"metrics.ttft_s": "no prompt was decoded"})
    assert records.from_json(records.to_json(row)).nulls["metrics.ttft_s"] == "no prompt was decoded"


def test_numpy_values_become_plain_numbers():
    row = make_row(
        metrics={"tau": np.float32(2.5), "rounds": np.int64(7)},
        params={"budget": np.int32(64), "graph": np.bool_(True)},
        depth_histogram=np.array([1, 2]),
    )
    assert row.metrics == {"tau": 2.5, "rounds": 7}
    assert [type(v) for v in (*row.metrics.values(), *row.params.values())] == [float, int, int, bool]
    assert row.depth_histogram == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field extra"),
        ({"case": None}, "case: expected str, found None"),
        ({"seed": "7"}, "seed: expected int, found '7'"),
        ({"seed": True}, "seed: expected int, found True"),
        ({"seed": 1.0}, "seed: expected int, found 1.0"),
        ({"metrics": {"tau": "2.5"}}, "metrics.tau"),
        ({"metrics": {"tau": True}}, "metrics.tau"),
        ({"params": {"a": [1]}}, "params.a"),
        ({"status": "FINE"}, "status: expected one of 'OK', 'INVALID', 'NOT_RUN', found 'FINE'"),
        ({"depth_histogram": 3}, "depth_histogram: expected a list"),
        ({"environment": {}}, "environment: missing field hardware_key"),
        ({"schema": 2}, "schema 2"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    plain = strict(records.to_json(full_row()))
    with pytest.raises(codec.FieldError) as caught:
        records.from_json(json.dumps({**plain, **change}))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Row)])
def test_every_missing_field_is_named(name):
    plain = strict(records.to_json(full_row()))
    del plain[name]
    with pytest.raises(codec.FieldError, match=name):
        records.from_json(json.dumps(plain))


def test_a_nested_unknown_field_a_repeated_field_and_nan_are_refused():
    line = records.to_json(full_row())
    with pytest.raises(codec.FieldError, match=r"parity: unknown field guess"):
        records.from_json(line.replace('"against":"ar","compared"', '"guess":1,"against":"ar","compared"'))
    with pytest.raises(codec.FieldError, match="suite stands twice"):
        records.from_json(line.replace('"suite":', '"suite":"x","suite":', 1))
    with pytest.raises(codec.FieldError, match="NaN"):
        records.from_json(line.replace('"seed":0', '"seed":NaN'))


@pytest.mark.parametrize(
    "change",
    [
        {"status": "OK", "reason": "because"},
        {"status": "INVALID"},
        {"status": "NOT_RUN", "reason": None},
        {"parity": Parity("ar", 0, 0)},
        {"parity": Parity("ar", 5, 1)},
        {"parity": None, "against": "ar", "block": "decode"},
        {"stages": {"draft": 1.0}},
        {"stages": {"draft": 1.0}, "timing": Timing("wall", "e2e", (1.0,), 1.0, 0, False)},
    ],
)
def test_a_row_that_contradicts_itself_cannot_be_made(change):
    with pytest.raises(codec.FieldError):
        make_row(**change)


def test_a_tree_of_uneven_arrays_cannot_be_made():
    with pytest.raises(codec.FieldError, match="lengths differ"):
        RecordedTree("p", 0, (1, 2), ("a",), (-1, 0), (0, 1), (0.0, -1.0), (0,), 3, "b")


def test_a_file_holds_each_row_at_once_and_in_order(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    rows = [make_row(arm=f"arm{i}") for i in range(3)]
    with records.RowFile(path) as file:
        for i, row in enumerate(rows):
            file.append(row)
            assert records.read(path) == rows[: i + 1]
    records.append(path, rows[0])
    assert records.read(path) == [*rows, rows[0]]
    assert records.latest(records.read(path)) == rows


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with records.RowFile(path), pytest.raises(records.RecordError, match="another process"):
        records.append(path, make_row())


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_a_torn_last_line_is_ignored_with_a_warning_and_cut_before_appending(tmp_path, share):
    path = tmp_path / "rows.jsonl"
    first, second = make_row(arm="a"), make_row(arm="b")
    line = records.to_json(second)
    path.write_text(records.to_json(first) + "\n" + line[: int(len(line) * share)])
    with pytest.warns(records.TornLineWarning, match="line 2"):
        assert records.read(path) == [first]
    with pytest.warns(records.TornLineWarning):
        records.append(path, second)
    assert records.read(path) == [first, second]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(records.to_json(make_row(arm="a")))
    records.append(path, make_row(arm="b"))
    assert [row.arm for row in records.read(path)] == ["a", "b"]


def test_every_cut_of_a_file_gives_a_prefix_of_its_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [make_row(arm=f"arm{i}") for i in range(2)]
    data = "".join(records.to_json(row) + "\n" for row in rows).encode()
    for cut in [*range(0, len(data), 7), len(data) - 1, len(data)]:
        path.write_bytes(data[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", records.TornLineWarning)
            found = records.read(path)
        assert found == rows[: len(found)]
        assert len(found) == data[: cut + 1].count(
            b"\n"
        )  # a row counts from its last byte on, the line end is optional


@pytest.mark.parametrize("damage", ["{", "", "[]", "\x00\x00", '{"schema":1}', '{"schema":9}', "not json"])
def test_damage_elsewhere_names_file_and_line(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    good = records.to_json(make_row())
    for text in (f"{good}\n{damage}\n{good}\n", f"{good}\n{damage}\n"):
        path.write_text(text)
        with pytest.raises(records.RecordError, match=r"rows\.jsonl, line 2"):
            records.read(path)
        with pytest.raises(records.RecordError, match=r"rows\.jsonl, line 2"):
            records.append(path, make_row())
        assert path.read_text() == text


def test_resume_skips_what_the_same_code_measured_on_the_same_hardware():
    here = make_environment()
    rows = [
        make_row(arm="done"),
        make_row(arm="wrong", status="INVALID", reason="parity", parity=Parity("ar", 3, 1)),
        make_row(arm="no gpu", status="NOT_RUN", reason="no CUDA device"),
        make_row(arm="older code", environment=make_environment(code="b" * 40)),
        make_row(arm="elsewhere", environment=make_environment(hardware_key="cpu-other-4")),
        make_row(arm="other input", case_hash="f" * 64),
    ]
    done = records.finished(rows, here)
    assert {arm for _, case_hash, arm in done if case_hash == rows[0].case_hash} == {"done", "wrong"}
    assert rows[0].key in done
    assert rows[5].key != ("decode/x", rows[0].case_hash, "other input")
