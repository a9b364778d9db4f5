"""posjax: which positional scheme still works beyond the length it was trained on, and how do you know?

What is listed here is the public interface; everything else may change. Names are imported when first used, so that
`import posjax` costs nothing.
"""
import importlib

_PUBLIC = {
    "posjax.cache_table": ("cache_bytes",),
    "posjax.config": ("default_config", "load_config"),
    "posjax.conformance.runner": ("check_scheme",),
    "posjax.errors": ("UserError",),
    "posjax.inspection.panels": ("inspect",),
    "posjax.models.decoder": ("Decoder", "DecoderConfig"),
    "posjax.models.generation": ("generate",),
    "posjax.ops.bias": ("LinearBias",),
    "posjax.ops.caches.cache": ("KVCache",),
    "posjax.ops.caches.codecs": ("quantisation_error",),
    "posjax.ops.rotary": ("Rotary",),
    "posjax.report.html": ("write_report",),
    "posjax.runs": ("Run", "load_run", "run"),
    "posjax.schemes.alibi": ("alibi_slopes",),
    "posjax.schemes.attend": ("attend", "attend_cached", "make_cache"),
    "posjax.schemes.base": ("Scheme",),
    "posjax.schemes.layers": ("Layers",),
    "posjax.schemes.registry": ("make_scheme", "register_scheme"),
    "posjax.schemes.rope_parameters": ("rope_parameters", "softmax_scale_multiplier"),
    "posjax.schemes.sharded": ("attend_sharded",),
    "posjax.schemes.t5": ("t5_bucket",),
    "posjax.schemes.temperature": ("make_temperature",),
    "posjax.tasks.base": ("Batch", "Task", "register_task"),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_WHERE, "sweeps"])
__version__ = "0.1.0"


def __getattr__(name):
    if name == "sweeps":
        return importlib.import_module("posjax.sweeps")
    if name not in _WHERE:
        raise AttributeError(f"module 'posjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__():
    return [*__all__, "__version__"]
