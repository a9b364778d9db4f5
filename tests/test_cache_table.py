"""The table of bytes is that of real caches."""
import json

import jax
import pytest

import posjax
from posjax.cli import main

SIZES = ["--layers=2", "--heads=4", "--groups=2", "--head_dim=8"]


def test_the_bytes_are_those_of_a_cache_in_memory():
    scheme = posjax.make_scheme("rope", num_heads=4, head_dim=8)
    for options, kind in (({}, "float32"), ({"quantise": "int8"}, "int8"), ({"window": 5}, "float32")):
        cache = posjax.make_cache(scheme, 32, batch_size=1, num_groups=2, dtype="bfloat16" if kind == "int8" else kind, **options)
        assert posjax.cache_bytes("rope", 32, heads=4, head_dim=8, groups=2, dtype=kind, window=options.get("window")) == sum(
            leaf.nbytes for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize(("words", "per_token"), [
    # Two layers of two heads: keys and values of 8 channels; a position and a segment of 4 bytes.
    (["--dtype=bfloat16"], 2 * (2 * 2 * 8 * 2 + 8)),
    (["--dtype=int8"], 2 * (2 * 2 * (8 + 4) + 8)),
    (["--dtype=float32", "--scheme=fox"], 2 * (2 * 2 * 8 * 4 + 4 * 4 + 8)),  # and a gate for each head of queries
    (["--dtype=float32", "--scheme=transformer_xl", "--dim=6"], 2 * (2 * (8 + 6 + 8) * 4 + 8)),  # and longer keys
    (["--dtype=float32", "--window=100"], 2 * (2 * 2 * 8 * 4 + 8)),
])
def test_a_token_takes(words, per_token, capsys):
    assert main(["cache", *SIZES, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dense = {int(tokens): count for tokens, count in found["dense"].items()}
    assert list(dense) == [4096, 32768, 131072, 1048576] and found["bytes_per_token"] == per_token
    fixed = dense[4096] - 4096 * per_token
    assert 0 < fixed < 100 and all(count == tokens * per_token + fixed for tokens, count in dense.items())
    if "--window=100" in words:
        assert set(found["window"].values()) == {100 * per_token + fixed}


def test_the_table_can_be_read(capsys):
    assert main(["cache", "--groups=8", "--window=4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ") [0].strip() == "tokens" and "a window of 4096" in lines[0]
    assert lines[-2].split() == ["1,048,576", "128.25", "GiB", "513.0", "MiB"]
    assert lines[-1].startswith("131,328 bytes a token.") and "only a window" in lines[-1]


@pytest.mark.parametrize(("words", "says"), [
    (["--dtype=int4"], "Unknown dtype of a cache 'int4'"),
    (["--groups=3"], "32 query heads are not a multiple of the 3 key heads"),
    (["--layers=0"], "layers is 0"),
    (["--window=0"], "window is 0"),
    (["--scheme=rpoe"], "Did you mean rope"),
    (["--dime=6"], "or option, 'dime'"),
])
def test_a_mistake_ends_in_one_line(words, says, capsys):
    assert main(["cache", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1
