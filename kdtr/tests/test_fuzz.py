"""A bounded run of the fuzzer, and a proof that it finds faults of each kind."""

from __future__ import annotations

import json
import shutil

import pytest

from kdtr.tests import cpp_build, fuzz
from kdtr.tests.cpp_build import INCLUDE
from kdtr.tests.make_vectors import VECTORS

pytestmark = cpp_build.needs("g++")


def test_bounded_run_reaches_every_class(tmp_path):
    verdicts = fuzz.fuzz(0, 60_000, tmp_path)
    listed = json.loads((VECTORS / "vectors.json").read_text())
    assert set(verdicts) == {v["expect"] for v in listed if v["level"] <= 2}
    assert min(verdicts.values()) >= 10
    assert verdicts["OK"] > 5_000
    assert list(tmp_path.iterdir()) == []


def test_readers_agree_on_mutants(tmp_path):
    fuzz.compare(0, 2_000, tmp_path)


def test_runs_are_reproducible_and_add_up(tmp_path):
    whole = fuzz.fuzz(100, 300, tmp_path)
    assert whole == fuzz.fuzz(100, 100, tmp_path) + fuzz.fuzz(200, 200, tmp_path)


def test_state_is_kept_and_of_one_source(tmp_path, monkeypatch, capsys):
    path = tmp_path / "fuzz.json"
    for total in ("100", "100", "150"):
        monkeypatch.setattr("sys.argv", ["fuzz", "--executions", total, "--differential", "20", "--state", str(path)])
        assert fuzz.main() == 0
    state = json.loads(path.read_text())
    assert (state["executions"], state["compared"], sum(state["verdicts"].values())) == (150, 20, 150)
    path.write_text(json.dumps(state | {"sources": "0"}))
    assert fuzz.main() == 1
    assert "other sources" in capsys.readouterr().err.replace("of sources 0", "of other sources")


ODD_MINOR = "std::string_view before; if (h.minor_version > 999) "
PLANTED = {
    # text of format.hpp, replacement, what the report says
    "read_past_the_end": ("end - r.offset - r.nbytes))", "end - r.offset - r.nbytes + 1))", "AddressSanitizer"),
    "undefined_behaviour": ("if (r.ndim > 8)", "if (false)", "runtime error"),
    "second_encoding": ('fail.unless_equal(Error::INDEX, "flags", r.flags, 0);', "", "second legal encoding"),
    "large_allocation": (
        "std::string_view before;",
        ODD_MINOR + "std::string(1 << 21, 'x');",
        "allocation above 1 MiB",
    ),
    "hang": ("std::string_view before;", ODD_MINOR + "for (volatile int i = 0; i < 1;) {}", "2 s in one execution"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_fault_is_found(plant, tmp_path):
    text, replacement, report = PLANTED[plant]
    shutil.copytree(INCLUDE, tmp_path / "include")
    header = tmp_path / "include" / "kdtr" / "format.hpp"
    source = header.read_text()
    assert source.count(text) == 1
    header.write_text(source.replace(text, replacement))
    with pytest.raises(fuzz.FuzzError, match=report) as caught:
        fuzz.fuzz(0, 300_000, tmp_path, include=tmp_path / "include")
    assert (tmp_path / "crash.kdtr").exists(), caught.value


@pytest.mark.slow
def test_planted_disagreement_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "python_verdict", lambda path: ("OK", ""))
    with pytest.raises(fuzz.FuzzError, match="Python"):
        fuzz.compare(0, 100, tmp_path)
    assert (tmp_path / "disagreement.kdtr").exists()
