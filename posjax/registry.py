"""Named things that anyone can add: schemes, tasks, position policies, length distributions."""
import importlib
import importlib.metadata
import inspect
import math
import numbers
import types

from posjax.errors import UserError, unknown


class Registry:
    """Classes by name, with checked construction from keyword hyper-parameters.

    Args:
      kind: what it holds, in the words of an error message ("scheme").
      package: imported on first use; importing it registers the built-in classes.
      entry_points: group under which other installed packages announce theirs, or None.
      supplied: constructor arguments that posjax passes itself, so not hyper-parameters.
    """

    def __init__(self, kind, *, package, entry_points=None, supplied=()):
        self.kind = kind
        self._package = package
        self._entry_points = entry_points
        self.supplied = frozenset(supplied)
        self._classes = {}
        self._loaded = False

    def register(self, name):
        """Class decorator: makes the class known as `name`, which is also set as its `name`."""
        def add(cls):
            old = self._classes.get(name)
            # The same source may be imported twice (once by name, once by path): the newer one wins.
            if old is not None and old.__qualname__ != cls.__qualname__:
                raise UserError(f"The {self.kind} name {name!r} is taken by {old.__module__}.{old.__qualname__}.")
            cls.name = name
            self._classes[name] = cls
            return cls
        return add

    def names(self):
        self._load()
        return sorted(self._classes)

    def get(self, name):
        self._load()
        if name not in self._classes:
            raise unknown(self.kind, name, self._classes)
        return self._classes[name]

    def hyper(self, name):
        """Hyper-parameters of `name` with their defaults, in the order of the constructor."""
        return self.hyper_of(self.get(name))

    def hyper_of(self, cls):
        """As `hyper`, of a class that need not be registered."""
        # Of `__init__`, since a metaclass (Flax's) may hide the signature of the class.
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        return {p.name: p.default for p in parameters
                if p.name not in self.supplied and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}

    def make(self, name, hyper, **supplied):
        """Builds `name` from its hyper-parameters; an unknown or missing one is a `UserError`."""
        return self.build(name, self.get(name), hyper, **supplied)

    def build(self, name, cls, hyper, **supplied):
        """As `make`, of a class that need not be registered; `name` is what messages call it."""
        known = self.hyper_of(cls)
        for given in hyper:
            if given not in known:
                raise unknown(f"hyper-parameter of {self.kind} {name}:", given, known)
        missing = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in hyper]
        if missing:
            raise UserError(f"The {self.kind} {name} needs a value for {', '.join(missing)}.")
        annotations = inspect.signature(cls.__init__).parameters
        for key, value in hyper.items():
            if not _is_a(value, annotations[key].annotation):
                kind = inspect.formatannotation(annotations[key].annotation)
                raise UserError(f"{key} of the {self.kind} {name} is {value!r}; it must be {kind}.")
            default = known[key]
            if isinstance(default, str | int | float) and isinstance(value, str) != isinstance(default, str):
                raise UserError(f"{key} of the {self.kind} {name} is {value!r}; a value like {default!r} is expected.")
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{key} of the {self.kind} {name} is {value}; it must be finite.")
            annotated = annotations[key].annotation is not inspect.Parameter.empty
            if not annotated and type(default) in (int, float, bool) and not _like(value, default):
                raise UserError(f"{key} of the {self.kind} {name} is {value!r}; {_KINDS[type(default)]} is expected.")
        return cls(**supplied, **hyper)

    def _load(self):
        if self._loaded:
            return
        self._loaded = True  # first, since what is imported may ask for names itself
        try:
            importlib.import_module(self._package)
            if self._entry_points:
                for entry in importlib.metadata.entry_points(group=self._entry_points):
                    entry.load()
        except BaseException:
            self._loaded = False  # the next call fails in the same words, not with an empty list of names
            raise


def described(section):
    """A part of a config that names a registered thing, in one line: "even (max_position=40)"."""
    own = ", ".join(f"{key}={value}" for key, value in section.items() if key != "name")
    return f"{section['name']} ({own})" if own else section["name"]


def beside_scheme(config):
    """What a config adds to its scheme, as texts: a temperature, windows, layers of another kind; empty for nothing."""
    def temperature(section):
        return [] if section.get("name", "none") == "none" else [f"temperature {described(section)}"]

    def window(tokens):
        return [] if tokens is None else [f"window {tokens}"]
    layers = config.get("layers", {})
    parameters = layers.get("parameters", "published")
    said = temperature(config.get("temperature", {})) + window(layers.get("window"))
    if parameters != "published":
        said.append(f"{parameters} parameters in its layers")
    if layers.get("other_every"):
        other = [described(layers["other"]), *temperature(layers["other_temperature"]), *window(layers["other_window"])]
        said.append(f"every layer that {layers['other_every']} divides {' and '.join(other)}")
    return said


_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def _like(value, default):
    """Whether a value can stand for a default that is a number or a truth value."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, numbers.Integral if isinstance(default, int) else numbers.Real)


def _is_a(value, annotation):
    """Whether `value` is of a type, or of one of a union, as far as the annotation says; an int is a float."""
    kinds = annotation.__args__ if isinstance(annotation, types.UnionType) else (annotation,)
    if annotation is inspect.Parameter.empty or not all(isinstance(kind, type) for kind in kinds):
        return True
    if isinstance(value, bool) and bool not in kinds:
        return False  # which Python would count as a number
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))
