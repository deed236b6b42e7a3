"""What the report says, and what it never says: a speed of a wrong result, a blank for what was not measured."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import compare, html, records, report
from harness.compare import Baseline
from harness.environment import CHECKOUT
from harness.records import Difference, Parity, Row
from harness.report import display_width, escape, markdown, table, text
from harness.tests.examples import make_environment
from harness.tests.runs import builder, decode, decodings, not_run, run, timed

STRINGS = (
    "1234e567",
    "0012345",
    "20200407_2",
    "1_000",
    "nan",
    "inf",
    "True",
    "18.0",
    "1E10",
    "a|b",
    "a\nb",
    "日本語",
    "5 µs",
)


def table_lines(page: str, first: str) -> list[list[str]]:
    """Cells of the lines of the table whose first header is `first`."""
    lines = page.splitlines()
    start = next(
        i for i, line in enumerate(lines) if re.match(rf"\| +{re.escape(first)} |\| {re.escape(first)} ", line)
    )
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def line_of(page: str, first: str, *cells: str) -> list[str]:
    return next(line for line in table_lines(page, first) if line[: len(cells)] == list(cells))


def csv_rows(rows: list[Row]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table(rows))))


def test_the_three_blocks_are_always_there_and_come_first():
    for rows in ([], run()):
        page = markdown(rows)
        places = [page.index(part) for part in ("**", "## Plain decoding", "## Tree builders", "## Definitions")]
        assert places == sorted(places)
        assert text(rows) in page
    assert "**NOTHING MEASURED:**" in markdown([])
    assert "**PASSED:**" in markdown(run())


def test_the_decode_table_has_the_baselines_beside_each_tree():
    line = line_of(markdown(run()), "dataset", "humaneval", "7")
    assert line == ["humaneval", "7", "2.90", "24.0", "38.4", "48.0", "2.00 [2.00, 2.00]", "yes", "OK"]


def test_a_tree_slower_than_its_own_chain_is_told_at_a_glance():
    page = markdown(run())
    told = {line[1]: line[-1] for line in table_lines(page, "dataset") if line[0] == "humaneval"}
    assert told["7"] == "OK"
    assert told["64"] == "SLOWER"
    assert "Of 6 trees 2 are faster than their own chain, 4 slower, 0 undecided." in " ".join(page.split())
    noisy = decode("humaneval", "ddtree-b16", 0.625, 3.1)
    samples = tuple(0.625 * (1.3 if i % 2 else 0.7) for i in range(12))
    noisy = dataclasses.replace(noisy, timing=timed(0.625, samples_s=samples))
    page = markdown([*decodings("humaneval")[:2], noisy])
    assert line_of(page, "dataset", "humaneval", "16")[-1] == "no gain"


def test_a_wrong_result_has_no_speed_in_any_format():
    first = Difference("tokens", "humaneval/3", 2, 17, 5, 9, 42, 0.25)
    parity = Parity("ar", 200, 1, 0, first, "divergence.kdtr")
    wrong = decode("humaneval", "ddtree-b7", 0.123456, 2.9, status="INVALID", reason="1 of 12 prompts", parity=parity)
    rows = [*decodings("humaneval")[:2], wrong]
    page = markdown(rows)
    assert line_of(page, "dataset", "humaneval", "7") == [
        "humaneval", "7", "INVALID", "24.0", "38.4", "INVALID", "INVALID", "NO", "INVALID",
    ]  # fmt: skip
    assert page.startswith("# DDTree harness report\n\n**FAILED:**")
    assert page.index("## Regressions and failures") < page.index("## Plain decoding")
    failure = " ".join(page.split())
    for fact in (
        "seed 42",
        "round 2",
        "index 17",
        "expected 5, got 9",
        "choice 0.25",
        "harness.parity divergence.kdtr",
    ):
        assert fact in failure
    speed = f"{24 / 0.123456:.3g}"
    assert all(speed[:3] not in each for each in (page, html.page(rows)))
    line = next(line for line in csv_rows(rows) if line["arm"] == "ddtree-b7")
    assert {line[n] for n in ("time.median_s", "gain.times_faster", "metrics.tokens_per_s", "metrics.tau")} == {
        "INVALID"
    }


def test_a_wrong_baseline_takes_every_speed_up_with_it():
    rows = decodings("humaneval")
    rows[0] = decode("humaneval", "ar", 1.0, status="INVALID", reason="AR differs from one pass")
    page = markdown(rows)
    line = line_of(page, "dataset", "humaneval", "7")
    assert (line[3], line[6]) == ("INVALID", "n/a")
    assert "no speed-up: arm ar INVALID: AR differs from one pass" in " ".join(page.split())


def test_what_did_not_run_says_why_and_is_counted_in_the_first_line():
    page = markdown(run())
    assert line_of(page, "dataset", "humaneval", "gpu")[-4:] == ["not run", "-", "-", "not run"]
    assert "5 not run: no CUDA device" in " ".join(page.split("## ")[0].split())
    assert "humaneval gpu, heldout_code gpu: not run: no CUDA device" in page
    assert {line[3] for line in table_lines(page, "budget")} == {"not run"}
    assert next(r for r in csv_rows(run()) if r["arm"] == "gpu")["reason"] == "no CUDA device"


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ((), "no samples"),
        ((1.0, math.nan), "1 of 2 samples are not finite"),
        ((math.inf, 1.0), "1 of 2 samples are not finite"),
    ],
)
def test_times_that_are_no_numbers_are_not_told(samples, reason):
    rows = [builder("heapq", 1.0), builder("cpp-heap", 1.0, timing=timed(1.0, samples_s=samples))]
    page = markdown(rows)
    assert table_lines(page, "budget")[0][4] == "n/a"
    assert f"time is n/a: {reason}" in page
    assert next(r for r in csv_rows(rows) if r["arm"] == "cpp-heap")["time.median_s"] == "n/a"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_few_and_extreme_samples_break_nothing(n, seconds):
    rows = [
        builder("heapq", 1.0, timing=timed(1.0, n)),
        builder("cpp-heap", seconds, timing=timed(seconds, n)),
        *[decode("x", arm, seconds, timing=timed(seconds, n), metrics={}) for arm in ("ar", "chain", "ddtree-b7")],
    ]
    for page in (markdown(rows), table(rows), html.page(rows)):
        assert not re.search(r"\b(nan|inf)\b", page, re.IGNORECASE)


def test_a_metric_without_a_value_gives_its_reason():
    row = decode("humaneval", "ar", 1.0, metrics={"tau": math.nan, "tokens_per_s": math.inf})
    page = markdown([row])
    assert line_of(page, "dataset", "humaneval", "AR")[2:4] == ["n/a", "n/a"]
    assert "tau is n/a: NaN" in page
    assert "tokens per s is n/a: infinite" in page
    line = csv_rows([row])[0]
    assert (line["metrics.tau"], line["nulls"]) == ("n/a", "metrics.tau: NaN; metrics.tokens_per_s: infinite")


@pytest.mark.parametrize("name", STRINGS)
def test_strings_come_back_as_they_are(name):
    environment = make_environment(commit=name, cpu=name)
    rows = [decode(name, arm, s, environment=environment, seed=None) for arm, s in (("ar", 1.0), ("chain", 0.5))]
    cell = table_lines(markdown(rows), "dataset")[0][0]
    assert re.sub(r"\\(.)", r"\1", cell.replace("<br>", "\n")) == name
    line = csv_rows(rows)[0]
    assert [line[n] for n in ("params.dataset", "environment.commit", "environment.cpu")] == [name] * 3
    assert f"commit: {escape(name)}" in markdown(rows)
    assert f'<td class="t">{html.escape(name)}</td>' in html.page(rows)


def test_pandas_reads_the_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(io.StringIO(table(run())), dtype=str, keep_default_na=False)
    assert frame.to_dict("records") == csv_rows(run())


def test_what_a_round_takes_outside_of_the_models_is_told():
    """All stages but drafting and verifying, of four rounds: 0.06 s."""
    (line,) = table_lines(markdown(run()).partition("## Stage shares")[2], "dataset")
    assert line[-1] == "15000"


@pytest.mark.parametrize("name", ["humaneval", "日本語" * 3, "x" * 70, "a|b " * 20])
def test_no_line_is_wider_than_100_columns(name):
    rows = [row for each in (name, "heldout_code") for row in decodings(each)]
    page = markdown([*run(), *rows])
    assert max(map(display_width, page.splitlines())) <= 100
    drawn = [line for line in page.splitlines() if line.startswith("|")]
    assert name in re.sub(r"\s+", " ", page.replace("\\|", "|")) + " " or len(name) == 80
    assert drawn


def test_columns_of_a_table_stand_below_each_other():
    page = markdown(decodings("日本語") + decodings("humaneval"))
    block: set[int] = set()
    for line in page.splitlines():
        if line.startswith("|"):
            block.add(display_width(line))
        else:
            assert len(block) <= 1
            block = set()


def test_looping_outputs_stand_apart_and_never_in_the_headline():
    calm = decodings("humaneval")
    loop = decodings("humaneval", params={"looping": True}, case="decode/humaneval/block8/greedy/looping")
    quick = decode("humaneval", "ddtree-b7", 0.01, 9.0, params={"looping": True}, case=loop[0].case)
    page = markdown([*calm, *loop[:2], quick])
    assert page.index("*block 8") < page.index("*Looping outputs")
    assert "tau 2.90)" in " ".join(page.split("##")[0].split())
    by_number = decode("humaneval", "chain", 0.5, metrics={"tau": 5.0, "distinct8": 0.5})
    assert "Looping outputs" in markdown([calm[0], by_number])


def test_groups_that_differ_in_a_parameter_stand_in_tables_of_their_own():
    warm = decodings("humaneval", params={"temperature": 1.0}, case="decode/humaneval/block8/t1")
    page = markdown([*decodings("humaneval"), *warm])
    assert "*block 8, greedy, 24 new tokens, system reference, processor time*" in page
    assert "*block 8, T = 1, 24 new tokens, system reference, processor time*" in page


def test_graph_and_eager_launches_are_named_and_not_mixed():
    graph = [
        decode("humaneval", arm, s, timing=timed(s, method="graph", launch=launch))
        for arm, s, launch in (("ar", 1.0, "graph"), ("chain", 0.5, "eager"), ("ddtree-b7", 0.6, "graph"))
    ]
    page = markdown(graph)
    assert "CUDA graph" in page
    assert "eager launches" in page
    assert line_of(page, "dataset", "humaneval", "7")[4] == "-"  # the chain ran in another way


def test_only_the_last_measurement_of_the_last_input_is_shown():
    old = decodings("humaneval", case_hash="d" * 64)
    again = decode("humaneval", "chain", 0.5, 2.0)
    page = markdown([*old, *decodings("humaneval")[:2], again])
    assert [line[1:3] for line in table_lines(page, "dataset")] == [["chain", "2.00"]]
    assert "5 rows of earlier inputs left out" in " ".join(page.split())


def test_regressions_stand_first():
    slow = [dataclasses.replace(row, timing=timed(3.0)) if row.arm == "ddtree-b7" else row for row in decodings("x")]
    found = compare.compare(slow, [Baseline("b", tuple(decodings("x")))])
    page = markdown(slow, found)
    assert page.index("FAIL SLOW time") < page.index("## Plain decoding")
    assert "**FAILED:**" in page
    assert "FAIL SLOW" in html.page(slow, found)


def test_the_same_rows_give_the_same_bytes_in_another_process(tmp_path):
    rows = run()
    file = tmp_path / "rows.jsonl"
    with records.RowFile(file) as out:
        for row in rows:
            out.append(row)
    code = "import sys; from harness import records, report; report.write(records.read(sys.argv[1]), sys.argv[2])"
    results = []
    for number, changes in enumerate(
        ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C"})
    ):
        folder = tmp_path / str(number)
        env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **changes}
        subprocess.run([sys.executable, "-c", code, str(file), str(folder)], check=True, env=env, cwd=tmp_path)
        results.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert results[0] == results[1]
    assert list(results[0]) == ["report.csv", "report.html", "report.md"]
    report.write(rows, tmp_path / "here")
    assert {path.name: path.read_bytes() for path in sorted((tmp_path / "here").iterdir())} == results[0]


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    paths = report.write(run(), tmp_path)
    before = paths.markdown.read_bytes()

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        report.write([], tmp_path)
    assert paths.markdown.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.csv", "report.html", "report.md"]


def test_text_that_has_no_encoding_or_moves_the_cursor_is_shown_as_numbers(tmp_path):
    paths = report.write(decodings("a\ud800\x1b[2J\u202eb"), tmp_path)
    for path in (paths.markdown, paths.html):
        content = path.read_bytes().decode("utf-8")
        assert not any(c in content for c in "\x1b\u202e\ud800")
    assert "\\u001b" in paths.html.read_text(encoding="utf-8")
    assert paths.csv.read_bytes().decode("utf-8")


def test_ordinary_text_is_not_disturbed_by_escapes():
    for plain in ("2.3 [2.2, 2.4]", "tau * T_AR", "heldout_code", "no CUDA driver (libcuda.so.1)", "x < y"[:1]):
        assert escape(plain) == plain
    assert escape("a|b *c* `d` <e> _f_ [g](h)") == r"a\|b \*c\* \`d\` \<e> \_f\_ [g\](h)"


def test_not_run_rows_alone_are_nothing_measured():
    row = decode("humaneval", "gpu", 1.0)
    page = markdown([dataclasses.replace(row, **{**not_run(row), "depth_histogram": None})])
    assert "**NOTHING MEASURED:**" in page
