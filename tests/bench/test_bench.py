"""The benchmarks at sizes where they measure nothing but that they run."""
import json

import jax.numpy as jnp
import pytest
import tiny

from posjax.bench.measure import Clock, compiled, kernels, temporaries
from posjax.cli import main

COMMANDS = {
    "attention": ["--lengths=24,32", "--repeats=1", "--memory_tokens=40"],
    "rope": ["--lengths=8", "--repeats=1"],
    "decode": ["--lengths=8,12", "--window=4", "--repeats=3"],
    "forward": ["--tokens=40", "--window=8", "--scheme=rope"],
}


@pytest.fixture(scope="module")
def measured():
    """Rows of a benchmark by its name, as a person gets them in JSON; each is run once."""
    found = {}

    def rows(name, capsys):
        if name not in found:
            with tiny.quick_compilation():
                assert main(["bench", name, "--json", *COMMANDS[name]]) == 0
            out, err = capsys.readouterr()
            record = json.loads(out)
            assert record["benchmark"] == name
            assert record["environment"]["command"] == " ".join(["posjax bench", name, *COMMANDS[name]])
            assert "compiling" in err or "programs" in err or "filling" in err
            found[name] = record["rows"]
        return found[name]
    return rows


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_gives_rows_of_one_kind(measured, capsys, name):
    rows = measured(name, capsys)
    assert len({tuple(row) for row in rows}) == 1
    assert all(value > 0 for row in rows for key, value in row.items()
               if value is not None and key.split("_")[0] in ("ms", "best", "of", "seconds", "peak", "cache"))


def test_attention_is_measured_against_its_peer_and_against_no_position(measured, capsys):
    rows = measured("attention", capsys)
    timed = [row for row in rows if row["tokens"] != 40]
    assert len(timed) == 2 * 2 * 7 and len(rows) == len(timed) + 2 * 6
    assert {row["of_nope"] for row in timed if row["attention"] == "nope"} == {1.0}
    assert {row["of_jax.nn"] for row in timed if row["attention"] == "jax.nn"} == {1.0}
    assert [row["bar"] for row in timed if row["attention"] == "t5" and row["pass"] == "forward"] == ["of_nope <= 1.5"] * 2
    assert all(row["temp_mib"] > 0 for row in rows)


def test_a_step_of_decoding_is_compiled_once_for_each_size_of_a_cache(measured, capsys):
    rows = measured("decode", capsys)
    assert [row["compilations"] for row in rows] == [1, 1, 2, 2]  # a window's cache has one size
    assert rows[0]["cache_mib"] == rows[1]["cache_mib"] and rows[2]["cache_mib"] < rows[3]["cache_mib"]


def test_a_table_for_people(capsys):
    with tiny.quick_compilation():
        assert main(["bench", "forward", *COMMANDS["forward"]]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["forward", "window", "tokens"] and row.split()[:3] == ["rope", "8", "40"]


@pytest.mark.parametrize("words, says", [
    (["bench"], "WHAT"),
    (["bench", "atention"], "'atention'"),
    (["bench", "rope", "--lengths=4;8"], "--lengths=4;8 cannot be read"),
    (["bench", "rope", "--repeats=0"], "--repeats=0 cannot be read"),
    (["bench", "rope", "--window=4"], "Unknown argument '--window=4'"),
    (["bench", "forward", "--tokens=8", "--scheme=alibbi"], "Did you mean alibi"),
])
def test_a_mistake_ends_in_one_line(capsys, words, says):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err.splitlines()[-1] and "Traceback" not in err


def test_programs_take_turns_and_the_first_round_does_not_count():
    order = []
    clock = Clock({name: lambda name=name: order.append(name) for name in "ab"}, repeats=2)
    assert order == list("ababab")
    assert clock.ratio("a", "a") == 1.0 and clock.ratio("a", "c") is None and clock.median("b") >= clock.best("b") > 0


def test_what_a_program_plans_is_read():
    x = jnp.ones((64, 64))
    fused = compiled(lambda x: jnp.sin(x) * 2 + 1, x)
    assert kernels(fused) == ["fusion"] and temporaries(fused) == 0
    product = compiled(lambda x: (x @ x) @ (x @ x.T), x)
    assert len(kernels(product)) == 3 and temporaries(product) >= 2 * 64 * 64 * 4 / 2**20
