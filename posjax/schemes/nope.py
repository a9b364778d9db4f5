from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme


@register_scheme("nope")
class NoPE(Scheme):
    """No positional encoding: only the causal mask tells order.

    Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466).
    """
    formula = "nothing is added; the causal mask alone breaks the symmetry"
    reference = "Kazemnejad et al. 2023, arXiv 2305.19466"
    relative = True
