"""Every check can fail: for each, a scheme with the fault that it is for. And what the runner says."""
import json
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax
from posjax import cli, conformance
from posjax.conformance import runner
from posjax.ops.bias import LinearBias, distances
from posjax.ops.rotary import apply_rotary
from posjax.schemes.base import Scheme
from posjax.schemes.learned import Learned
from posjax.schemes.registry import SCHEMES
from posjax.schemes.rope import RoPE


class Good(Scheme):
    name, formula, reference = "good", "x + sin(p) s, s learned", "this file"

    def __init__(self, *, start=0.5, **dims):
        super().__init__(**dims)
        self.scale = nnx.Param(jnp.full(self.model_dim, start))

    def wave(self, positions):
        """Of float32, `[..., T, D]`."""
        return jnp.sin(positions.astype(jnp.float32))[..., None] * self.scale[...].reshape((1,) * positions.ndim + (-1,))

    def embed(self, x, positions):
        wave = self.wave(positions)
        return x + (wave if wave.ndim == 3 else wave[None]).astype(x.dtype)


class SeesAll(Good):
    def embed(self, x, positions):
        return super().embed(x, positions) + x.mean(1, keepdims=True)


class ShiftsTokens(Good):
    """The previous token, of the neighbouring document too."""
    def embed(self, x, positions):
        return x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


class FirstRow(Good):
    def embed(self, x, positions):
        return super().embed(x, positions[0] if positions.ndim == 2 else positions)


class CountsPadding(Good):
    """The index of a token, not its position."""
    def embed(self, x, positions):
        return super().embed(x, jnp.arange(x.shape[1]))


class SeesTwo(Scheme):
    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        lag = distances(q_positions, k_positions)
        return jnp.where((lag < 2)[..., None, :, :] if lag.ndim == 3 else (lag < 2)[None, None], logits, -1e9)


class DividesByKeysSeen(Scheme):
    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        return logits / visible.sum(-1)[:, None, :, None].astype(jnp.float32) + jnp.float32(0) * jnp.log(
            visible.any(-1).astype(jnp.float32))[:, None, :, None]


class CountsFromFirstQuery(RoPE):
    def rotate(self, q, k, q_positions, k_positions):
        return apply_rotary(q, jnp.arange(q.shape[1]), self.rotary()), apply_rotary(k, k_positions, self.rotary())


class OneRank(RoPE):
    def rotate(self, q, k, q_positions, k_positions):
        jnp.concatenate([q_positions, k_positions], -1)
        return super().rotate(q, k, q_positions, k_positions)


class ReadsPositions(Good):
    def embed(self, x, positions):
        return super().embed(x, positions + int(np.asarray(positions).min()) * 0)


class SaysRelative(Good):
    relative = True


class SaysNotRelative(RoPE):
    relative = False


class SaysDependsOnLength(RoPE):
    depends_on_length = True


class HidesTheError(Learned):
    def embed(self, x, positions):
        return jax.jit(super().embed)(x, positions)


class FewPositions(RoPE):
    """As far as half precision counts."""
    def rotate(self, q, k, q_positions, k_positions):
        q_positions, k_positions = (p.astype(jnp.bfloat16).astype(jnp.int32) for p in (q_positions, k_positions))
        return super().rotate(q, k, q_positions, k_positions)


class ClampsPositions(Learned):
    def embed(self, x, positions):
        return super().embed(x, jnp.minimum(positions, self.max_length - 1))


class GrowsUndeclared(RoPE):
    def rotate(self, q, k, q_positions, k_positions):
        return q, k * (1 + k_positions.max().astype(k.dtype))


class HidesNoHook(Scheme):
    def bias(self):
        return LinearBias(jnp.zeros(self.num_heads))


class Float32Queries(RoPE):
    def rotate(self, q, k, q_positions, k_positions):
        return tuple(x.astype(jnp.float32) for x in super().rotate(q, k, q_positions, k_positions))


class HalfPhases(Good):
    def embed(self, x, positions):
        phases = jnp.sin(positions.astype(x.dtype))[..., None]
        return x + (phases if phases.ndim == 3 else phases[None])


class CountsKeyHeads(Scheme):
    def rotate(self, q, k, q_positions, k_positions):
        return q, k * jnp.arange(1, k.shape[2] + 1, dtype=k.dtype)[None, None, :, None]


class SquaresWeights(Scheme):
    """Not linear: a backend may not have divided the weights by their sum yet."""
    def values(self, weights, q_positions, k_positions):
        total = (weights**2).sum(-1).transpose(0, 2, 1)[..., None]
        return jnp.broadcast_to(total, (*total.shape[:3], self.head_dim))


class MixesDtypes(Good):
    def embed(self, x, positions):
        return x + super().embed(jnp.zeros(x.shape, jnp.float32), positions)


class Warns(Good):
    def __init__(self, **dims):
        super().__init__(**dims)
        warnings.warn("old", DeprecationWarning, stacklevel=1)


class Nameless(Good):
    formula = ""


class Positional(Good):
    def __init__(self, start=0.5, **dims):
        super().__init__(start=start, **dims)


class KeepsTable(Good):
    def __init__(self, **dims):
        super().__init__(**dims)
        self.table = nnx.Variable(jnp.arange(8))


class ReadsItsDraw(Good):
    def __init__(self, **dims):
        super().__init__(**dims)
        self.start = float(jax.random.uniform(dims["rngs"].params()))


class UnusedParameter(Good):
    def __init__(self, **dims):
        super().__init__(**dims)
        self.spare = nnx.Param(jnp.ones(3))


class CallsBack(Good):
    """Which `jax.vmap` refuses."""
    def wave(self, positions):
        like = jax.ShapeDtypeStruct((self.model_dim,), jnp.float32)
        return super().wave(positions) * jax.pure_callback(np.abs, like, self.scale[...]).reshape((1,) * positions.ndim + (-1,))


# Of each check, a scheme with the fault that it is for, and what it says.
FAULTS = [
    ("causal", SeesAll, "outputs before a token that was changed: expected equal bit for bit, found 320 of 320 different"),
    ("packed", ShiftsTokens, "the second of two packed documents, against itself alone: expected equal to within 5e-06"),
    ("rows", FirstRow, "a row with positions .3, 5, 7.*, against itself alone"),
    ("left_padding", CountsPadding, "a left-padded prompt, against itself alone"),
    ("window", SeesTwo, r"expected .1, 2, 3, 3.* in some head, found .1, 2, 2"),
    ("masked_rows", DividesByKeysSeen, "expected finite, found .* NaN"),
    ("decode", CountsFromFirstQuery, "the last 1 tokens, against the full pass"),
    ("mixed_ranks", OneRank, "Cannot concatenate"),
    ("cached_decoding", GrowsUndeclared, "a prompt and 10 tokens from a cache, against the full pass: expected equal"),
    ("cached_rows", ShiftsTokens, "the second document and the padded row, alone: expected equal"),
    ("jit_once", ReadsPositions, "traced array"),
    ("relative", SaysRelative, "relative is True, so outputs with all positions shifted by 1000: expected equal"),
    ("relative", SaysNotRelative, "relative is False, so .* expected to differ"),
    ("max_length", ClampsPositions, "position max_length = 512 under jit: expected NaN, found numbers"),
    ("max_length", HidesTheError, "position max_length = 512, known outside of jit: expected a ValueError, found none"),
    ("max_length", FewPositions, "relative is True and max_length None, so outputs at position 10000019: expected equal"),
    ("depends_on_length", GrowsUndeclared, "depends_on_length is False, .* ends at position 10000019, not 8: expected equal"),
    ("depends_on_length", SaysDependsOnLength, "depends_on_length is True, .* expected to differ"),
    ("permutation", HidesNoHook, "a hook of the scheme is overridden, .* expected to differ"),
    ("half_precision", Float32Queries, "dtype of the output for bfloat16 inputs: expected the same, found float32"),
    ("float32_phases", HalfPhases, "expected float32, found sin of bfloat16"),
    ("grouped_heads", CountsKeyHeads, "4 heads on 2 of keys, against repeated keys, backend dense"),
    ("backends_agree", SquaresWeights, "backend dense against the reference with no options"),
    ("strict", MixesDtypes, "promotion"),
    ("strict", Warns, "old"),
    ("described", Nameless, "formula: expected a text, found none"),
    ("hyper_parameters", Positional, "the parameter start of __init__: expected keyword-only"),
    ("state", KeepsTable, "found others at .*table"),
    ("abstract_restore", ReadsItsDraw, "tracer"),
    ("gradients", UnusedParameter, "gradients of .*spare.*: expected some other than zero, found none"),
    ("replicas", CallsBack, "vmap"),
]
CHECKS = {check.__name__.removeprefix("check_"): check for check in conformance.CHECKS}


def test_every_check_has_a_fault_that_it_is_for():
    assert {name for name, *_ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(("name", "scheme", "says"), FAULTS, ids=[f"{name}-{cls.__name__}" for name, cls, _ in FAULTS])
@pytest.mark.filterwarnings("ignore:old")
def test_a_check_fails_on_the_fault_that_it_is_for(name, scheme, says):
    with pytest.raises(Exception, match=says):
        CHECKS[name](conformance.subject(scheme))


def test_a_scheme_without_these_faults_conforms():
    results = posjax.check_scheme(Good, start=0.4)
    assert [result.check for result in results] == list(CHECKS)
    assert all(result.holds and result.reason is None for result in results), "\n".join(map(str, results))


def test_an_error_in_a_check_is_a_failure_with_its_place(monkeypatch):
    def check_one(subject):
        """One.

        More.
        """
        Good.embed(subject.scheme, None, None)
    monkeypatch.setattr(runner, "CHECKS", (check_one,))
    shown = []
    (result,) = posjax.check_scheme(Good, on_result=shown.append)
    assert shown == [result] and (result.check, result.states, result.holds) == ("one", "One.", False)
    assert re.fullmatch(r"AttributeError: .*astype.* \(.*test_conformance_checks.py line \d+\)", result.reason)


FILE = """import posjax
@posjax.register_scheme("from_file")
class Mine(posjax.Scheme):
    formula = "none"
    def __init__(self, *, start: float = 1.0, **dims):
        super().__init__(**dims)
        1 / start
class Other: pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "their_schemes.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "CHECKS", (CHECKS["described"], CHECKS["state"]))
    known = dict(SCHEMES._classes)
    yield tmp_path
    SCHEMES._classes.clear()
    SCHEMES._classes.update(known)
    sys.modules.pop("their_schemes", None)


@pytest.mark.parametrize("target", ["their_schemes.py:Mine", "their_schemes:Mine"])
def test_the_command_checks_a_scheme_of_the_users_own(folder, capsys, target):
    assert cli.main(["check-scheme", target, "--start=2.0", "--num_heads=2"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("FAILS  described ") and first.endswith("-> reference: expected a text, found none.")
    assert second.startswith("holds  state ")
    assert last == f"{target}: 1 of 2 checks hold; described fails."
    assert cli.main(["check-scheme", target, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["check"], row["holds"]) for row in rows] == [("described", False), ("state", True)]


def test_the_command_checks_a_registered_scheme(folder, capsys):
    assert cli.main(["check-scheme", "rope", "--base=500", "--layout=interleaved"]) == 0
    assert capsys.readouterr().out.endswith("rope: all 2 checks hold.\n")


@pytest.mark.parametrize(("words", "says"), [
    (["ropee"], "Unknown scheme 'ropee'. Did you mean rope"),
    (["nowhere.py:Mine"], "Cannot import nowhere.py: no such file"),
    (["nowhere.at_all:Mine"], "Cannot import nowhere.at_all: there is no module nowhere here; give package.module:Class"),
    (["their_schemes.py:Mein"], "Unknown scheme of their_schemes.py: 'Mein'. Did you mean Mine"),
    (["their_schemes.py:Other"], "their_schemes.py:Other is no subclass of posjax.Scheme; those of their_schemes.py: Mine"),
    (["their_schemes.py:Mine", "--strat=2"], "Unknown hyper-parameter of Mine: 'strat'. Did you mean start"),
    (["their_schemes.py:Mine", "--start=two"], "start='two' cannot be read; a value like 1.0 is expected"),
    (["their_schemes.py:Mine", "--start=0.0"], "their_schemes.py line 7: ZeroDivisionError"),
    (["rope", "--base", "5"], "--base needs a value: --base=VALUE"),
    (["rope", "--head_dim=7"], "head_dim must be even; it is 7"),
    (["learned", "--max_length=9"], "max_length is 9; the checks need at least 21 positions"),
    ([], "required: SCHEME"),
])
def test_a_bad_target_ends_in_one_line(folder, capsys, words, says):
    assert cli.main(["check-scheme", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
