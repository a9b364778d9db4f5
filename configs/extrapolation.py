"""The main question: trained on copying up to 16 symbols, which scheme still copies beyond?

Five schemes, 3 seeds each: `posjax sweep --config=configs/extrapolation.py --jobs=2`; `scripts/demo.sh` runs it.
"""
import posjax
from posjax import sweeps


def get_config():
    return posjax.default_config(task="copy")


def sweep():
    """The learned table gets a row for every training position and none beyond (see configs/copy.py)."""
    learned = sweeps.product(sweeps.sweep("scheme.name", ["learned"]), sweeps.sweep("scheme.max_length", [33]),
                             sweeps.sweep("scheme.init_scale", [1.0]))
    return sweeps.chain(sweeps.sweep("scheme.name", ["alibi", "nope", "rope", "sinusoidal"]), learned)
