"""Golden files: made again they are the same; implementations of lesser precision pass them, broken ones do not."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import kdtr
from reference.accept import accept
from reference.cache import LatentCache
from reference.checkpoint import load_drafter, load_target
from reference.drafter import OracleDrafter
from reference.golden import __main__ as golden_command
from reference.golden import op
from reference.golden.__main__ import FOLDER, golden_files, main
from reference.golden.attention import full_keys, full_query, visibility_of
from reference.golden.inputs import gaussian, gaussian_at, words
from reference.loop import ar_generate, ddtree_generate
from reference.mla import latent_attention
from reference.numerics import Numerics
from reference.sampling import GREEDY, choose_rows
from reference.topk import topk_logprob
from reference.tree import build_tree

MIB = 1 << 20
PINNED_WORDS = [[3831323184, 2973912642, 4008701165, 1754801499], [764057076, 544806252, 2944584219, 968929480]]
PINNED_GAUSSIANS = [1070424550, 1023964880, 1066766796]  # bit patterns


@pytest.fixture(scope="module")
def computed():
    return golden_files()


def cases(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Arrays of a golden file by case, then by name."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, array in kdtr.read(FOLDER / f"{name}.kdtr").items():
        case, _, rest = path.partition("/")
        found.setdefault(case, {})[rest] = array
    return found


def compare_case(name: str, case: str, actual: dict[str, np.ndarray]) -> None:
    """Hold `actual` to the stored tolerances of one case."""
    golden = kdtr.read(FOLDER / f"{name}.kdtr")
    for short, array in actual.items():
        info = golden.info[f"{case}/{short}" if case else short]
        assert info.tolerance is not None
        row = kdtr.compare_array(info.name, golden[info.name], array, info.tolerance)
        assert row.ok, f"{info.name}: {row.problem}"


def test_files_are_those_that_the_generator_makes(computed):
    stored = {
        path.stem for path in FOLDER.glob("*.kdtr") if not path.stem.startswith(("drafter_lists", "ddtree_public"))
    }
    assert stored == set(computed)


def test_made_again_they_are_the_same(computed):
    """Integers and inputs bit for bit, float results within 1 ulp: so on any machine."""
    problems = [text for file in computed.values() for text in file.differences(FOLDER / f"{file.name}.kdtr")]
    assert problems == []


def test_the_same_arrays_give_the_same_bytes(computed, tmp_path):
    for file in computed.values():
        digests = set()
        for side in ("a", "b"):
            (tmp_path / side).mkdir(exist_ok=True)
            digests.add(hashlib.sha256(file.save(tmp_path / side).read_bytes()).hexdigest())
        assert len(digests) == 1, file.name


def test_every_file_is_valid_and_all_fit_their_space(computed):
    for path in FOLDER.glob("*.kdtr"):
        with kdtr.open(path) as handle:
            handle.verify()
            handle.validate()
    assert sum(path.stat().st_size for path in FOLDER.glob("*.kdtr")) <= 8 * MIB


def test_a_changed_value_is_found(computed, tmp_path):
    file = computed["op_router"]
    path = file.save(tmp_path)
    assert list(file.differences(path)) == []
    arrays = dict(kdtr.read(path))
    with kdtr.open(path) as handle:
        info = handle.info
        arrays["ties/weights"][0, 0] = np.nextafter(np.nextafter(arrays["ties/weights"][0, 0], 2), 2)
        arrays["ties/ids"][1, 0] ^= 1
        tolerances = {name: i.tolerance for name, i in info.items() if i.tolerance is not None}
        kdtr.save(
            path, arrays, kind=handle.kind, meta=None, roles={n: i.role for n, i in info.items()}, tolerances=tolerances
        )
    found = "\n".join(file.differences(path))
    assert "'ties/weights'" in found
    assert "'ties/ids'" in found
    assert found.count("\n") == 1


def test_command_checks_and_names_what_there_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(golden_command, "STAGES", (op,))
    assert main(["--out", str(tmp_path), "op_router"]) == 0
    assert main(["--out", str(tmp_path), "--check", "op_router"]) == 0
    assert "as computed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        main(["no_such_file"])
    assert error.value.code == 2


def test_generator_is_pinned():
    """Known values, for ports to other languages; element i does not depend on how many are asked for."""
    assert words(1, 2, np.array([0, 1 << 33])).tolist() == PINNED_WORDS
    assert gaussian(1, 2, 3).view(np.uint32).tolist() == PINNED_GAUSSIANS
    many = gaussian(9, 4, 5000)
    assert np.array_equal(gaussian_at(9, 4, np.array([4999, 17])), many[[4999, 17]])
    assert abs(float(many.mean())) < 0.05
    assert abs(float(many.std()) - 1) < 0.05


@pytest.mark.parametrize("name", ["tree_ties", "tree_degenerate", "tree_random"])
def test_trees(name):
    for case, arrays in cases(name).items():
        tree = build_tree(arrays["lp"], arrays["ids"], int(arrays["budget"]), int(arrays["root_token"]))
        padded = tree.padded(int(arrays["budget"]), len(arrays["lp"]), int(arrays["prefix_length"]))
        for array_name, array in padded.items():
            assert array.tobytes() == arrays[array_name].tobytes(), f"{case}/{array_name}"


def test_topk_within_tolerance_from_a_float32_log_sum_exp():
    """An engine that sums in float32, in another order, still passes; a normaliser of another base does not."""
    for case, arrays in cases("topk").items():
        logits = arrays["logits"].astype(np.float32)[:, : int(arrays["vocab_size"])]
        top = topk_logprob(logits, int(arrays["k"]), int(arrays["vocab_size"]))
        compare_case("topk", case, {"ids": top.ids, "lp": top.lp, "logz": top.logz})
    arrays = cases("topk")["v1000"]
    with pytest.raises(AssertionError):
        compare_case("topk", "v1000", {"logz": arrays["logz"] / np.float32(np.log(2))})


def test_walks():
    for case, arrays in cases("accept").items():
        rows = int(arrays["node_count"]) + 1
        if "logits" in arrays:
            choices = choose_rows(arrays["logits"], GREEDY, np.arange(len(arrays["logits"])))
        else:
            choices = arrays["choices"]
        result = accept(arrays["tokens"], arrays["parents"], choices, rows - 1)
        compare_case("accept", case, {"accepted": result.nodes, "bonus": np.array(result.bonus, np.int32)})


def test_walks_reach_every_depth_and_rank_of_the_noisy_oracle():
    lengths = {
        len(arrays["accepted"]) - 1 for case, arrays in cases("accept").items() if case.startswith(("noisy", "wide"))
    }
    assert lengths >= set(range(8))


def test_compactions():
    for case, arrays in cases("compact").items():
        rows, prefix, path = arrays["rows"].copy(), int(arrays["prefix_length"]), arrays["accepted"]
        block_size = int(arrays["block_size"]) if "block_size" in arrays else None
        capacity = prefix + 34 if not case.startswith("noisy") else 108
        layers, _, width = rows.shape
        cache = LatentCache(layers, width - 2, 2, capacity, rows.dtype, block_size, arrays.get("block_table"), rows)
        slot = np.arange(capacity)
        if block_size:
            slot = arrays["block_table"][slot // block_size] * block_size + slot % block_size
        for count, kept in (
            (prefix, np.arange(prefix)),
            (capacity - prefix, path),
        ):  # the prefix, then the scratch rows
            for layer in range(layers):
                scratch = arrays["rows"][layer, slot[cache.length : cache.length + count]]
                cache.write(layer, scratch[:, :-2], scratch[:, -2:])
            cache.commit(kept)
        assert np.array_equal(cache.storage, arrays["rows_after"]), case


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_of_lesser_precision_passes(precision):
    numerics = Numerics.of(precision)
    for case, arrays in cases("attention_small").items():
        if (precision == "bfloat16") != case.endswith("bf16"):
            continue
        names = ("q_latent", "q_rope", "latent", "rope_key")
        inputs: list[Any] = [arrays[name].astype(np.float32) for name in names]
        for chunk in (None, 7):
            scale, sees = float(arrays["scale"]), arrays["visible"]
            query, rope, latent, key = inputs
            out, lse = latent_attention(query, rope, latent, key, scale, numerics, visible=sees, chunk=chunk)
            compare_case("attention_small", case, {"out": out, "lse": lse})


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_full_size_attention_of_lesser_precision_passes(precision):
    numerics = Numerics.of(precision)
    for case, arrays in cases("attention_full").items():
        seed, heads, parents = int(arrays["seed"]), int(arrays["heads"]), arrays["parents"]
        keys = full_keys(seed, int(arrays["prefix_length"]) + len(parents))
        latent, rope_key = (keys[name].astype(np.float32) for name in ("latent", "rope_key"))
        sees = visibility_of(parents)
        out, lse = [], []
        for row, head in arrays["pairs"][:6].tolist():
            query = full_query(seed, heads, row, head)
            one, one_lse = latent_attention(
                query["q_latent"].astype(np.float32),
                query["q_rope"].astype(np.float32),
                latent,
                rope_key,
                float(arrays["scale"]),
                numerics,
                visible=sees[row : row + 1],
            )
            out.append(one[0, 0])
            lse.append(one_lse[0, 0])
        golden = kdtr.read(FOLDER / "attention_full.kdtr")
        for name, actual in (("sampled_out", np.stack(out)), ("sampled_lse", np.stack(lse))):
            info = golden.info[f"{case}/{name}"]
            assert info.tolerance is not None
            assert kdtr.compare_array(name, golden[info.name][:6], actual, info.tolerance).ok, f"{case}/{name}"


def test_a_node_that_sees_its_sibling_fails():
    arrays = cases("attention_small")["tree_n33_p64"]
    inputs = (arrays["q_latent"], arrays["q_rope"], arrays["latent"], arrays["rope_key"])
    wrong = arrays["visible"].copy()
    row, column = np.argwhere(~wrong & np.tri(len(wrong), dtype=bool))[0]
    wrong[row, column] = True
    out, _ = latent_attention(*inputs, float(arrays["scale"]), Numerics.of("float32"), visible=wrong)
    with pytest.raises(AssertionError):
        compare_case("attention_small", "tree_n33_p64", {"out": out})


@pytest.mark.parametrize("name", ["tiny", "tiny_mla"])
def test_float32_target_reaches_the_golden_tokens_and_logits(name):
    """24 of 24 tokens, logits within 8e-6, every activation within its tolerance; oracle tree: 3 rounds, tau 8."""
    target = load_target(FOLDER / f"{name}.kdtr", "float32")
    golden = kdtr.read(FOLDER / f"{name}_run.kdtr")
    prompt, tokens = golden["prompt"], golden["tokens"]
    assert len(tokens) == 24
    assert len(set(tokens.tolist())) >= 12, "the output loops: it would hide faults"
    assert ar_generate(target, None, prompt, max_new_tokens=24).tokens == tuple(tokens.tolist())

    cache = target.new_cache(len(prompt) + 24)
    trace: dict[str, np.ndarray] = {}
    logits = [target.forward(prompt, cache, trace=trace).logits[-1]]
    cache.commit(np.arange(len(prompt)))
    tree_trace: dict[str, np.ndarray] = {}
    target.forward(golden["tree.tokens"], cache, visibility=visibility_of(golden["tree.parents"]), trace=tree_trace)
    for token in tokens[:-1]:
        logits.append(target.forward(np.array([token]), cache).logits[0])
        cache.commit([0])
    actual = {"tokens": tokens, "logits": np.stack(logits)}
    for part, arrays in (("prefill", trace), ("tree", tree_trace)):
        for short, array in arrays.items():
            at = f"{part}.{short.replace('/', '.')}"
            if at in golden:
                actual[at] = array
            else:
                actual[f"{at}.last_row"] = array[-1:]

    oracle = OracleDrafter(tokens, target.vocab_size, 8)
    generation = ddtree_generate(target, oracle, prompt, max_new_tokens=24, budget=7)
    assert (len(generation.rounds), generation.tau) == (3, 8.0)
    actual["ddtree.tokens"] = np.array(generation.tokens, np.int32)
    actual["ddtree.accepted"] = np.array([r.accepted for r in generation.rounds], np.int32)
    kdtr.compare(golden, actual).raise_if_failed()


def test_float32_drafter_reaches_the_golden_logits():
    target = load_target(FOLDER / "tiny.kdtr", "float32")
    drafter = load_drafter(FOLDER / "tiny_drafter.kdtr", target)
    golden = kdtr.read(FOLDER / "tiny_drafter_run.kdtr")
    drafter.reset(golden["prompt"])
    actual = {"tokens": golden["tokens"]}
    for part in ("round_0", "round_1"):
        trace: dict[str, np.ndarray] = {}
        drafter.observe(golden[f"{part}.tokens"], golden[f"{part}.features"], trace)
        drafter.block_logits(int(golden[f"{part}.root_token"]), trace)
        actual |= {f"{part}.{name.replace('/', '.')}": array for name, array in trace.items()}
    kdtr.compare(golden, actual).raise_if_failed()
