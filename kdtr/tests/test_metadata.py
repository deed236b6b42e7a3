"""Metadata: one spelling, what provenance gives, what level 3 asks for."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdtr
from kdtr import errors
from kdtr.format import MAX_META_DEPTH, MAX_META_INT
from kdtr.metadata import decode_meta, encode_meta, meta_problems
from kdtr.tests.raw_file import File, Tensor

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_META_INT, MAX_META_INT) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text().filter(lambda k: k not in ("generator", "kind_schema")), JSON, max_size=4))
def test_round_trip_and_key_order(meta):
    text = encode_meta(meta, "any", 1)
    assert text == encode_meta(dict(reversed(meta.items())), "any", 1)
    back = decode_meta(text)
    assert {key: back[key] for key in meta} == meta
    assert encode_meta(back, "any", 1) == text


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        '{"":"","a":[null,true,false,0,-1,"é\\n\\u001f\\\\\\"/\x7f"],"é":{},"\U0001f600":1}'.encode(),
        b'{"a":%d,"b":-%d}' % (MAX_META_INT, MAX_META_INT),
        nested(MAX_META_DEPTH),
    ],
)
def test_legal_spellings(text):
    assert json.loads(text) == decode_meta(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not legal JSON"),
        (b"{", "not legal JSON"),
        (b"[]", "a JSON list, must be an object"),
        (b"null", "NoneType"),
        (b'{"a":1} ', "canonical spelling, from byte 7"),
        (b'{"a": 1}', "canonical spelling"),
        (b'{"b":1,"a":1}', "canonical spelling"),
        (b'{"a":1,"a":1}', "'a' comes twice"),
        (b'{"a":1.0}', "number 1.0: only integers"),
        (b'{"a":1e2}', "number 1e2"),
        (b'{"a":NaN}', "number NaN"),
        (b'{"a":-0}', "canonical spelling"),
        (b'{"a":9007199254740992}', "over"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not legal JSON"),
        (b'{"a":"\\u0041"}', "canonical spelling"),
        (b'{"a":"\\/"}', "canonical spelling"),
        (b'{"a":"\\u001F"}', "canonical spelling"),
        (b'{"a":"\\u000a"}', "canonical spelling"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":"\xff"}', "not legal JSON"),
        (b'{"a":"\xed\xa0\x80"}', "not legal JSON"),
        (b'\xef\xbb\xbf{"a":1}', "not legal JSON"),
        (b'{"a":"\n"}', "not legal JSON"),
        (nested(MAX_META_DEPTH + 1), "more than 16 deep"),
        (nested(100_000), "not legal JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not legal JSON"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_illegal_spellings(text, message):
    with pytest.raises(errors.MetaError, match=re.escape(message)) as caught:
        decode_meta(text, "file")
    assert caught.value.path == "file"


def full(**changes: Any) -> dict[str, Any]:
    return decode_meta(encode_meta(kdtr.provenance(seed=1, rng="PCG64"), "any", 1)) | changes


SHAPES = {"x": (2, 3), "s": ()}


def test_provenance_is_all_that_is_required():
    assert list(meta_problems(full(), "any", 1, SHAPES)) == []
    text = json.dumps(kdtr.provenance(device="H200", license="MIT"))
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert kdtr.provenance(source={"dirty": False})["source"] == {"repo": None, "git_sha": None, "dirty": False}
    assert kdtr.provenance(notes="n")["notes"] == "n"
    assert kdtr.provenance(libs={})["libs"] == {}


@pytest.mark.parametrize("key", ["generator", "seed", "rng", "source", "libs", "platform", "command", "kind_schema"])
def test_required_keys(key):
    meta = full()
    del meta[key]
    assert any(f"metadata key {key}" in problem for problem in meta_problems(meta, "any", 1, SHAPES))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": True}, "seed is True, must be int or str or null"),
        ({"rng": 3}, "rng is 3"),
        ({"source": None}, "source/repo is missing"),
        ({"source": {"repo": None, "git_sha": None, "dirty": "no"}}, "source/dirty is 'no'"),
        ({"generator": {"name": "x", "version": 1}}, "generator/version is 1"),
        ({"libs": {"numpy": 2}}, "libs/numpy is 2"),
        ({"libs": None}, "libs is None, must be dict"),
        ({"kind_schema": "any/2"}, "kind_schema is 'any/2', the header says any/1"),
        ({"notes": 3}, "notes is 3"),
        ({"license": []}, "license is []"),
        ({"parents": ["ab"]}, "SHA-256"),
        ({"parents": "ab"}, "SHA-256"),
        ({"tensors": []}, "tensors must be an object"),
        ({"tensors": {"y": {}}}, "tensors/y: the file has no such tensor"),
        ({"tensors": {"x": 3}}, "tensors/x must be an object"),
        ({"tensors": {"x": {"desc": 1}}}, "desc must be a string"),
        ({"tensors": {"x": {"dims": ["a"]}}}, "each of the 2 dimensions"),
        ({"tensors": {"x": {"dims": ["a", 3]}}}, "each of the 2 dimensions"),
        ({"tensors": {"x": {"quant": []}}}, "quant must be an object"),
        ({"tensors": {"x": {"quant": {"scale": "y", "block": [1]}}}}, "scale 'y' is not a tensor"),
        ({"tensors": {"x": {"quant": {"scale": "s", "block": [0]}}}}, "block is [0]"),
        ({"tensors": {"x": {"quant": {"scale": [], "block": [1]}}}}, "scale [] is not a tensor"),
    ],
    ids=str,
)
def test_wrong_values(changes, problem):
    assert any(problem in found for found in meta_problems(full(**changes), "any", 1, SHAPES))


def test_optional_and_unknown_keys_are_accepted():
    entry = {"desc": "d", "dims": ["rows", None], "layout": "row-major", "quant": {"scale": "s", "block": [128, 128]}}
    meta = full(
        tensors={"x": {**entry, "mine": 1}}, parents=["0" * 64], license="MIT", notes="", anything={"else": [1]}
    )
    assert list(meta_problems(meta, "any", 1, SHAPES)) == []


def test_validate_lists_every_problem(tmp_path):
    kdtr.save(tmp_path / "a", {"x": np.ones(1)}, kind="any", meta={"tensors": {"y": {}}})
    with kdtr.open(tmp_path / "a") as handle:
        with pytest.raises(errors.MetaError) as caught:
            handle.validate()
        assert len(caught.value.problems) == 11  # ten required keys and the absent tensor
        assert "seed is missing" in str(caught.value)
        assert "; and 3 more" in str(caught.value)


def test_illegal_metadata_do_not_hinder_levels_1_and_2(tmp_path):
    (tmp_path / "a").write_bytes(File([Tensor(b"x", "u8", (1,), b"\1")], meta=b"\xff not JSON").to_bytes())
    fixture = kdtr.read(tmp_path / "a")
    assert fixture["x"].tolist() == [1]
    with pytest.raises(errors.MetaError):
        _ = fixture.meta
    with kdtr.open(tmp_path / "a") as handle:
        handle.verify()
        for ask in (handle.validate, lambda: handle.meta):
            with pytest.raises(errors.MetaError):
                ask()
