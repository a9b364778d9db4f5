"""Nested mappings by dotted keys, as configs and their records are compared and overridden."""


def flatten(nested, prefix=""):
    """`{"train": {"steps": 5}}` as `{"train.steps": 5}`; an empty section stays, as a value."""
    flat = {}
    for key, value in nested.items():
        if hasattr(value, "items") and len(value):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
