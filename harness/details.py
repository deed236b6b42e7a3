"""What stands below the three blocks and explains them: details, stages, acceptance, cost of verifying, machine."""

from __future__ import annotations

from collections.abc import Iterable

from harness import attention_report
from harness.blocks import SHARED, cell, explain, headline, mark, place_of
from harness.records import Environment, Row
from harness.stats import Number
from harness.tables import (
    NONE,
    Line,
    Measured,
    Notes,
    Section,
    Table,
    arm_label,
    builder_input,
    columns,
    dataset_of,
    environments,
    equal,
    faster,
    grouped,
    looping,
    median,
    method,
    metric,
    show,
    show_interval,
    show_speed,
    status,
)


def details(measured: Measured) -> list[Section]:
    """All of these parts that have content."""
    parts = [
        _decode_details(measured),
        _policy(measured),
        _replay(measured),
        _stages(measured),
        _acceptance(measured),
        _curve(measured),
        attention_report.section(measured),
        _other_builders(measured),
        _bench(measured),
        _environment(measured),
        DEFINITIONS,
    ]
    return [part for part in parts if part.tables or part.items]


def _decode_details(measured: Measured) -> Section:
    headers = (
        "<dataset",
        "budget",
        "mean tau",
        "rounds",
        "TTFT ms",
        "TPOT ms",
        "loop eff.",
        "x chain [95 %]",
    )
    tables = []
    for heading, members in grouped(headline(measured), measured, SHARED).items():
        notes, lines = Notes(), []
        for row in (r for r in members if r.status != "NOT_RUN"):
            kind = method(row)
            over = faster(measured.chain(row), row)
            plain = ("tau_mean", "rounds")
            times = [
                show(metric(row, "ttft_s"), 1e3),
                show(metric(row, "tpot_s"), 1e3),
                show(metric(row, "loop_efficiency")) if kind != "ar" else NONE,
            ]
            if row.status == "OK" and kind == "tree" and over.value is None:
                notes.add(place_of(row), f"no ratio to a chain: {over.reason}")
            if (prompts := metric(row, "prompts")).value is not None:
                left_out = row.metrics.get("looping_left_out")
                loops = f", {left_out} whose output loops were left out" if left_out else ""
                notes.add(dataset_of(row), f"{show(prompts)} prompts{loops}")
            numbers = [show(metric(row, name)) for name in plain]
            lines.append(
                Line(
                    (
                        dataset_of(row),
                        arm_label(row).removeprefix("tree "),
                        *(numbers + times if row.status == "OK" else [status(row)] * 5),
                        cell(row, over, show_interval) if kind == "tree" else NONE,
                    ),
                    mark(measured, row),
                )
            )
        if lines:
            tables.append(Table(heading, columns(*headers), tuple(lines), notes.sentences()))
    return Section("More about the same decodings", tables=tuple(tables))


def _policy(measured: Measured) -> Section:
    """What a policy that chooses the budgets of rounds expected of them, beside what they gave."""
    names = ("<dataset", "at most", "nodes", "tokens expected", "tokens", "us expected", "us")
    rows = [row for row in measured.block("decode") if row.status == "OK" and "predicted_tokens" in row.metrics]
    tables = []
    for heading, members in grouped(rows, measured, SHARED).items():
        lines = [
            Line(
                (
                    dataset_of(row),
                    str(row.params.get("budget", NONE)),
                    *(show(metric(row, name)) for name in ("nodes_per_round", "predicted_tokens", "round_tokens")),
                    *(show(metric(row, name), 1e6) for name in ("predicted_s", "round_s")),
                )
            )
            for row in members
        ]
        tables.append(Table(heading, columns(*names), tuple(lines)))
    text = "By the probabilities that the drafter gave in the rounds before, and by what rounds of a first prompt took."
    return Section("Budgets chosen by the policy, a round", (text,), tuple(tables))


def _other_builders(measured: Measured) -> Section:
    """Arms that stand in no column of the main table, and the intervals of all ratios."""
    headers = ("budget", "depth", "batch", "<builder", "us", "heapq/it [95 %]", "<equal", "<status")
    inputs: dict[str, list[Line]] = {}
    for row in measured.block("builder"):
        if row.status == "NOT_RUN" or row.arm == "heapq":
            continue
        line = Line(
            (
                *(str(row.params.get(name, NONE)) for name in ("budget", "depth_limit", "batch")),
                arm_label(row),
                show_speed(row, median(row), 1e6),
                cell(row, faster(measured.base(row), row), show_interval),
                equal(row),
                status(row),
            ),
            "bad" if row.status == "INVALID" else "",
        )
        inputs.setdefault(builder_input(row), []).append(line)
    note = "SGLang's builders give other trees than the contract's; each is held against its own rules."
    notes = (note,) if any("sglang" in row.arm for row in measured.block("builder")) else ()
    tables = tuple(Table(f"From {name}", columns(*headers), tuple(lines), notes) for name, lines in inputs.items())
    return Section("All builders against Python's heapq", tables=tables)


def _replay(measured: Measured) -> Section:
    names = ("<dataset", "<acceptance", "<decoding", "tau", "rounds", "ms", "speed-up [95 %]", "loop eff.", "<status")
    tables = []
    for heading, members in grouped(measured.block("replay"), measured, {*SHARED, "acceptance"}).items():
        notes, lines = Notes(), []
        for row in members:
            explain(notes, row)
            if row.status == "OK" and "roofline_share" in row.metrics:
                step, read = show(metric(row, "step_s"), 1e3), show(metric(row, "bytes"), 1e-9)
                notes.add(
                    place_of(row),
                    f"{step} ms a token, which reads {read} GB: {_roofline(row)} % of the memory's roofline, a copy's "
                    f"{show(metric(row, 'copy_bytes_per_s'), 1e-12)} TB/s",
                )
            lines.append(
                Line(
                    (
                        dataset_of(row),
                        str(row.params.get("acceptance", NONE)),
                        arm_label(row),
                        cell(row, metric(row, "tau")),
                        cell(row, metric(row, "rounds")),
                        show_speed(row, median(row), 1e3),
                        cell(row, faster(measured.base(row), row), show_interval) if method(row) != "ar" else NONE,
                        cell(row, metric(row, "loop_efficiency")) if "loop_efficiency" in row.metrics else NONE,
                        status(row),
                    ),
                    mark(measured, row),
                )
            )
        tables.append(Table(heading, columns(*names), tuple(lines), notes.sentences()))
    text = "The models do their full work, what they say is replaced. No claim of lossless output is made here."
    return Section("Replay: acceptance given, not found", (text,), tuple(tables))


def _own_time(row: Row) -> str:
    """Microseconds of a round outside of the two models."""
    rounds = metric(row, "rounds").value
    seconds = [each for name, each in (row.stages or {}).items() if name not in ("draft", "verify", "other")]
    if not rounds or not seconds or None in seconds:
        return NONE
    return show(Number(sum(each for each in seconds if each is not None) / rounds), 1e6)


def _stages(measured: Measured) -> Section:
    rows = measured.block("stage")
    names = stage_names(rows)
    tables = []
    for heading, members in grouped(rows, measured, SHARED).items():
        notes, lines = Notes(), []
        for row in members:
            explain(notes, row)
            shares = stage_shares(row)
            cells = [f"{100 * shares[name]:.1f}" if name in shares else NONE for name in names]
            cells.append(_own_time(row))
            lines.append(
                Line(
                    (dataset_of(row), arm_label(row), *(cells if row.status == "OK" else [status(row)] * len(cells))),
                    mark(measured, row) if row.status != "OK" else "",
                )
            )
        notes.add("own us", "what a round takes outside of the models: top-k, tree, accept, compaction, control")
        headers = columns("<dataset", "<decoding", *names, "own us")
        tables.append(Table(heading, headers, tuple(lines), notes.sentences()))
    return Section("Stage shares, % of the decode time", tables=tuple(tables))


def stage_names(rows: Iterable[Row]) -> list[str]:
    """Names of stages in order of first appearance, "other" last."""
    names = dict.fromkeys(name for row in rows for name in row.stages or {})
    other = [name for name in names if name == "other"]
    return [*(name for name in names if name != "other"), *other]


def stage_shares(row: Row) -> dict[str, float]:
    """Share of each stage in the sum of an OK row's stages; empty where a stage is n/a or the sum is not positive."""
    seconds = {name: value for name, value in (row.stages or {}).items() if value is not None}
    total = sum(seconds.values())
    if row.status != "OK" or len(seconds) < len(row.stages or {}) or total <= 0:
        return {}
    return {name: value / total for name, value in seconds.items()}


def _acceptance(measured: Measured) -> Section:
    header = "<% of rounds that accepted 0, 1, 2 ... draft tokens"
    tables = []
    for heading, members in grouped(measured.block("decode"), measured, SHARED).items():
        lines = []
        for row in members:
            if method(row) == "ar" or row.status != "OK" or not (shares := acceptance(row)):
                continue
            cells = " ".join(f"{100 * share:.0f}".rjust(2) for share in shares)
            name = dataset_of(row) + (" (looping)" if looping(row) else "")
            lines.append(Line((name, arm_label(row), cell(row, metric(row, "tau")), cells.lstrip())))
        if lines:
            tables.append(Table(heading, columns("<dataset", "<decoding", "tau", header), tuple(lines)))
    return Section("Acceptance by depth", tables=tuple(tables))


def acceptance(row: Row) -> list[float]:
    """Share of the rounds that accepted 0, 1, ... draft tokens; empty without rounds."""
    counts = row.depth_histogram or ()
    return [count / sum(counts) for count in counts] if sum(counts) > 0 else []


def _curve(measured: Measured) -> Section:
    tables = []
    for heading, members in grouped(measured.block("curve"), measured, {*SHARED, "rows"}).items():
        notes, lines = Notes(), []
        more = any("experts_per_layer" in row.metrics for row in members)
        extra = ("experts/layer", "% roofline") if more else ()
        headers = ("rows N", "ms", "T_verify(N)/T_AR [95 %]", *extra, "<equal", "<status")
        for row in members:
            explain(notes, row)
            lines.append(
                Line(
                    (
                        str(row.params.get("rows", arm_label(row))),
                        show_speed(row, median(row), 1e3),
                        cell(row, verify_cost(measured, row), show_interval),
                        *([cell(row, metric(row, "experts_per_layer")), _roofline(row)] if more else []),
                        equal(row),
                        status(row),
                    ),
                    mark(measured, row) if row.status != "OK" else "",
                )
            )
        tables.append(Table(heading, columns(*headers), tuple(lines), notes.sentences()))
    return Section("Cost of verifying N rows at once", tables=tuple(tables))


def _roofline(row: Row) -> str:
    """Share of the time that reading the pass's bytes takes at the speed of a copy."""
    return show(metric(row, "roofline_share"), 100) if row.status == "OK" else NONE


def verify_cost(measured: Measured, row: Row) -> Number:
    """T_verify(N) / T_AR with its interval."""
    base = measured.arm(row, row.against) if row.against else row
    return faster(row, base) if base is not row or row.status != "OK" else Number(1.0)


def _bench(measured: Measured) -> Section:
    members = measured.block("bench")
    against = any(row.against is not None and row.timing is not None for row in members)
    extra = ("times as fast [95 %]",) if against else ()
    headers = ("<case", "<arm", "median us", "quartiles us", *extra, "<equal", "<status")
    notes, lines = Notes(), []
    for row in members:
        explain(notes, row)
        found = median(row)
        ends = [show(Number(end, None, found.low, found.high), 1e6) for end in (found.low, found.high)]
        between = f"{ends[0]} to {ends[1]}" if found.value is not None else NONE
        gain = [cell(row, faster(measured.arm(row, row.against), row), show_interval) if row.against else NONE]
        cells = (row.case, row.arm, show_speed(row, found, 1e6), between, *(gain if against else []))
        lines.append(Line((*cells, equal(row), status(row))))
        if against and row.against:
            notes.add(row.arm, f"against {row.against}")
    tables = (Table("", columns(*headers), tuple(lines), notes.sentences()),) if lines else ()
    return Section("Benchmarks", tables=tables)


def _environment(measured: Measured) -> Section:
    found = environments(measured.rows)
    items: list[str] = []
    for number, environment in enumerate(found, 1):
        prefix = f"({number}) " if len(found) > 1 else ""
        items += [f"{prefix}{text}" for text in environment_facts(environment)]
    return Section("Environment", items=tuple(items))


def environment_facts(environment: Environment) -> list[str]:
    """Facts as "name: value"; strings as they are stored."""
    e = environment
    dirty = {True: "with uncommitted changes", False: "clean", None: "unknown whether clean"}[e.dirty]
    facts = [
        f"hardware key: {e.hardware_key}",
        f"processor: {e.cpu}, {e.cores} cores, {e.arch}, {e.os}",
        f"commit: {e.commit or 'unknown'}, {dirty}; code {e.code}",
    ]
    if e.gpu is None:
        facts.append(f"GPU: none: {e.gpu_missing or 'not looked for'}")
    else:
        g = e.gpu
        busy = {True: "busy with other work", False: "not busy", None: "unknown whether busy"}[g.busy]
        facts.append(
            f"GPU: {g.name}, {g.sm_count or 'n/a'} SMs, compute capability {g.compute_capability or 'n/a'}, driver "
            f"{g.driver or 'n/a'}, power limit {show(Number(g.power_limit_w))} W, {busy}"
        )
    facts.append("versions: " + ", ".join(f"{name} {version or 'none'}" for name, version in e.versions.items()))
    facts.append("threads: " + ", ".join(f"{name}={'unset' if v is None else v}" for name, v in e.threads.items()))
    facts.append(
        "modules: "
        + ", ".join(f"{name} from {place.removesuffix('/__init__.py')}" for name, place in e.modules.items())
    )
    facts += [f"library {name}: SHA-256 {value}" for name, value in e.libraries.items()]
    return facts + [f"PROBLEM: {problem}" for problem in e.problems]


DEFINITIONS = Section(
    "Definitions",
    items=(
        "tau: tokens committed per target forward, the bonus token included: 1 + accepted/rounds, pooled over all "
        "rounds; mean tau: mean of the prompts' own values. Budget: non-root nodes of a tree.",
        "tok/s: output tokens over decode seconds, prefill excluded. TTFT: median seconds to the first token. TPOT: "
        "decode seconds per token.",
        "speed-up: sum of AR's decode seconds / sum of the method's decode seconds over the same tokens, with a 95 % "
        "bootstrap interval over prompts; where a sample is the same work once more: median of the turns' ratios.",
        "status: OK; SLOWER = correct, but slower than the chain with the same drafter (interval below 1); no gain = "
        "correct, and the interval against the chain contains 1; INVALID = results differ, so no speed is told; "
        "not run = why stands below the table.",
        "equal: output tokens, accepted counts and trees are those of the reference; (n) = n places where the target's "
        "two best choices were closer than the allowed margin.",
        "loop eff.: speed-up / (tau * T_AR / (T_draft + T_verify)), the share of the possible gain that the loop "
        "delivers; of the engine alone, T_draft and T_verify are those of the extra run of its first prompt, by "
        "events inside the graph that is replayed; kernels of two stages do not overlap there, as they may elsewhere. "
        "Stage shares come from extra runs with marks between the stages; they are never used for speeds.",
        "attention: of N rows of a tree over L cached rows, by the engine's kernels (wgmma, mma.sync, float32), by "
        "FlashMLA's dense kernel, which has no mask (alone, and joined with the tree's nodes by PyTorch), by PyTorch. "
        "OK: every head's row is that of sums in float64 up to rounding, the engine's also that of plain decoding, bit "
        "for bit. TFLOP/s and GB/s count what the tree needs: the keys that each row sees; cache rows, queries and "
        "results once. % roof: the time of so much at the speed of a copy or of a large product, whichever is longer, "
        "over the time taken. x FlashMLA: times faster than it is without the tree.",
        "times: median, with digits that end at the noise (quartiles or interval); n/a: why stands below the table.",
    ),
)
