import json

import pytest

from posjax import config as configs
from posjax.errors import UserError
from posjax.schemes.registry import SCHEMES


@pytest.fixture
def base():
    return configs.default_config()


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)
    return write


@pytest.fixture
def forget(monkeypatch):
    """What a test registers is unknown to the next."""
    SCHEMES.names()
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES._classes))


def error(function, *args, **kwargs):
    """The one line that the call ends in."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flat_and_nested_keys_mean_the_same(base):
    flat = configs.override(base, {"train.steps": 7, "train.lengths.max": 3})
    nested = configs.override(base, {"train": {"steps": 7, "lengths": {"max": 3}}})
    assert configs.to_json(flat) == configs.to_json(nested)
    assert (flat.train.steps, flat.train.lengths.max) == (7, 3)


def test_an_override_leaves_the_config_that_it_came_from(base):
    before = configs.to_json(base)
    configs.override(base, {"train.steps": 7, "scheme": "alibi"})
    assert configs.to_json(base) == before


@pytest.mark.parametrize("key, text, value", [
    ("train.steps", "7", 7),
    ("train.learning_rate", "1", 1.0),
    ("train.learning_rate", "1e-3", 1e-3),
    ("eval.lengths", "4,8", (4, 8)),
    ("eval.lengths", "(4, 8)", (4, 8)),
    ("eval.lengths", "[4, 8]", (4, 8)),
    ("eval.lengths", "4", (4,)),
    ("task.unique", "true", True),
    ("task.unique", "False", False),
    ("model.head_dim", "16", 16),
    ("model.head_dim", "None", None),
    ("model.head_dim", "none", None),
    ("model.dtype", "bfloat16", "bfloat16"),
])
def test_strings_of_a_command_line_become_the_type_of_the_key(base, key, text, value):
    got = configs.get(configs.override(base, {key: text}), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("key, value", [
    ("train.steps", "seven"), ("train.steps", "7.5"), ("train.steps", 7.0), ("train.steps", True), ("train.steps", "None"),
    ("train.learning_rate", "True"), ("train.learning_rate", "fast"), ("eval.lengths", "4,x"), ("eval.lengths", "4,8.5"),
    ("eval.lengths", "'4'"), ("task.unique", "1"), ("model.dtype", 32), ("train.steps", "{[]: 1}"), ("train.steps", "(" * 500),
])
def test_a_value_of_another_type_is_refused_with_its_key_and_value(base, key, value):
    message = error(configs.override, base, {key: value})
    assert key in message and repr(value) in message


def test_an_unknown_key_is_told_with_close_matches_and_all_keys(base):
    message = error(configs.override, base, {"train.step": "7"})
    assert "'train.step'" in message and "Did you mean train.steps" in message and "eval.lengths" in message


@pytest.mark.parametrize("key", ["stepz", "train.lengths.max.more", "trian.steps", "scheme.bases", ""])
def test_keys_that_do_not_exist(base, key):
    assert "Unknown config key" in error(configs.override, base, {key: "1"})


def test_a_section_is_no_value(base):
    message = error(configs.override, base, {"train": "7"})
    assert message.startswith("train is a section") and "steps" in message


def test_a_new_name_brings_its_own_hyper_parameters(base):
    config = configs.override(base, {"scheme.name": "learned", "scheme.max_length": "40"})
    assert config.scheme.to_dict() == {"name": "learned", "max_length": 40, "init_scale": 0.02, "offset": 0}
    assert "Unknown config key 'scheme.base'" in error(configs.override, config, {"scheme.base": "1.0"})


def test_the_order_of_a_name_and_its_hyper_parameters_is_free(base):
    config = configs.override(base, {"scheme.max_length": "40", "scheme.name": "learned"})
    assert config.scheme.max_length == 40


def test_the_same_name_again_keeps_what_was_set(base):
    config = configs.override(base, {"scheme.base": 500.0})
    assert configs.override(config, {"scheme": "rope"}).scheme.base == 500.0


@pytest.mark.parametrize("overrides", [{"scheme": "alibi", "task": "mqar", "positions.train": "randomised"},
                                       {"scheme": "alibi", "task": "mqar", "positions": {"train": "randomised"}},
                                       {"scheme": {"name": "alibi"}, "task.name": "mqar",
                                        "positions": {"train": {"name": "randomised"}}}])
def test_a_name_alone_may_stand_for_its_section(base, overrides):
    config = configs.override(base, overrides)
    assert (config.scheme.name, config.task.name, config.positions.train.name) == ("alibi", "mqar", "randomised")
    assert config.positions.train.max_position == 2048 and config.positions.eval.name == "sequential"


@pytest.mark.parametrize("key, near", [("scheme", "alibi"), ("task", "copy"), ("positions.eval", "even")])
def test_an_unknown_name_is_told_with_the_close_ones(base, key, near):
    assert f"Did you mean {near}" in error(configs.override, base, {key: near + "x"})


def test_json_round_trip(base):
    config = configs.override(base, {"scheme": "learned", "task": "needle", "task.depths": "0.0,1.0"})
    data = json.loads(json.dumps(configs.to_json(config)))
    assert configs.from_json(data).to_dict() == config.to_dict()
    assert "Unknown config key" in error(configs.override, configs.from_json(data), {"nope": 1})


def test_the_config_of_a_run_can_be_given_for_a_config_file(base, write):
    config = configs.override(base, {"scheme": "alibi", "train.steps": 7})
    path = write(json.dumps(configs.to_json(config)), "config.json")
    assert configs.load_config(path).to_dict() == config.to_dict()
    assert configs.load_config(path, **{"train.steps": 8}).train.steps == 8


@pytest.mark.parametrize("change, says", [
    (lambda data: data["train"].pop("steps"), "train.steps is missing"),
    (lambda data: data["train"].update(stepz=1), "Unknown config key 'train.stepz'"),
    (lambda data: data["train"].update(steps="many"), "train.steps='many'"),
    (lambda data: data.pop("scheme"), "is not the config of a run"),
])
def test_a_config_json_edited_by_hand_is_checked(base, write, change, says):
    data = configs.to_json(base)
    change(data)
    assert says in error(configs.load_config, write(json.dumps(data), "config.json"))


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"imports": 3}'])
def test_another_json_file_is_no_config(write, text):
    assert "is not the config of a run" in error(configs.load_config, write(text, "config.json"))


def test_a_config_file_with_and_without_argument(write):
    path = write("import posjax\ndef get_config(scheme='nope'):\n    return posjax.default_config(scheme=scheme)\n")
    assert configs.load_config(path).scheme.name == "nope"
    assert configs.load_config(path + ":alibi", **{"train.steps": 4}).scheme.name == "alibi"
    assert "Did you mean alibi" in error(configs.load_config, path + ":alibbi")


def test_a_missing_config_file_is_told_with_those_beside_it(write):
    path = write("")
    assert f"Did you mean {path}" in error(configs.load_config, path.replace("mine", "mne"))


@pytest.mark.parametrize("text, argument, says", [
    ("x = 1\n", "", "no get_config"),
    ("def get_config():\n    return 3\n", "", "returns int"),
    ("def get_config():\n    pass\n", ":a", "takes no argument"),
    ("def get_config(n):\n    return int(n)\n", ":a", "mine.py line 2: ValueError: invalid literal"),
    ("def get_config(n):\n    return n\n", "", "TypeError"),
    ("def get_config(\n", "", "mine.py line 1: SyntaxError"),
    ("import os\nimport nope_at_all\n", "", "mine.py line 2: ModuleNotFoundError: No module named 'nope_at_all'"),
    ("import posjax\ndef get_config():\n    c = posjax.default_config()\n    c.train.stepz = 1\n    return c\n", "",
     "mine.py line 4: AttributeError"),
    ("import json\ndef get_config():\n    json.loads('{')\n", "", "mine.py line 3: JSONDecodeError"),
])
def test_a_fault_in_the_users_own_file_is_one_line_with_its_place(write, text, argument, says):
    assert says in error(configs.load_config, write(text) + argument)


def test_a_file_that_is_not_python(write):
    assert "must end in .py" in error(configs.load_config, write("", "mine.yaml"))


@pytest.mark.parametrize("name, says", [("nope_at_all", "Cannot import nope_at_all: ModuleNotFoundError"),
                                        ("nope.py", "Cannot import nope.py: no such file"), (".x", "Cannot import .x")])
def test_imports_that_do_not_exist(name, says):
    assert says in error(configs.import_modules, [name])


def test_a_fault_in_an_imported_file(write):
    assert "mine.py line 2: ZeroDivisionError" in error(configs.import_modules, [write("x = 0\n1 / x\n")])


def test_imports_are_recorded_and_come_first(write, forget):
    scheme = write("import posjax\n@posjax.register_scheme('mine')\nclass Mine(posjax.Scheme):\n"
                   "    def __init__(self, *, power=2.0, **dims):\n        super().__init__(**dims)\n", "scheme.py")
    path = write("import posjax\ndef get_config():\n    return posjax.default_config(scheme='mine')\n")
    config = configs.load_config(path, [scheme], **{"scheme.power": "3"})
    assert config.imports == (scheme,) and config.scheme.power == 3.0
    assert configs.from_json(configs.to_json(config)).to_dict() == config.to_dict()


def test_a_hyper_parameter_without_default_cannot_stand_in_a_config(write, forget):
    configs.import_modules([write("import posjax\n@posjax.register_scheme('bare')\nclass Bare(posjax.Scheme):\n"
                                  "    def __init__(self, *, power, **dims):\n        super().__init__(**dims)\n")])
    assert "power has no default" in error(configs.default_config, scheme="bare")
