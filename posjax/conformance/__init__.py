"""What every positional scheme must do, as functions of a `subject`, and a runner for them.

A check returns if its property holds (the first line of its docstring) and raises if not. In a test suite:

    @pytest.mark.parametrize("check", posjax.conformance.CHECKS, ids=lambda check: check.__name__)
    def test_conforms(check):
        check(posjax.conformance.subject(MyScheme))
"""
from posjax.conformance import arithmetic, cached, decoding, masks, positions, state
from posjax.conformance.expect import CheckFailed
from posjax.conformance.subject import Subject, subject

__all__ = ["CHECKS", "CheckFailed", "Subject", "subject"]

CHECKS = tuple(check for module in (masks, decoding, cached, positions, arithmetic, state)
               for name, check in vars(module).items() if name.startswith("check_"))
