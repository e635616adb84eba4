"""Configuration: conf/ and the classes are one thing, wrong keys are refused with the right one, secrets stay out."""

import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

from polar_env import config as config_module
from polar_env.config import (
    Group,
    PolarConfig,
    child_environment,
    compose,
    conf_dir,
    environment,
    export,
    load,
    override,
)
from polar_env.engine import ENGINES
from polar_env.errors import ConfigError
from polar_env.harness import HARNESSES
from polar_env.types import CallKind

REPO = Path(__file__).resolve().parents[1]
CONF = REPO / "conf"

GROUPS: dict[str, type[Group]] = {
    name: field.annotation
    for name, field in PolarConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Group)
}


def written(path: Path) -> dict[str, object]:
    """The keys a group file sets, without Hydra's own."""
    loaded = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items() if key != "defaults"}


# --- conf/ mirrors the classes ----------------------------------------------------------------------------------


def test_every_folder_is_a_group_and_every_group_a_folder() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_default_yaml_shows_every_key_with_the_default_of_the_class(group: str) -> None:
    keys = written(CONF / group / "default.yaml")
    assert set(keys) == set(GROUPS[group].model_fields)
    assert GROUPS[group].model_validate(keys) == GROUPS[group]()


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_group_file_validates_and_names_only_what_differs(path: Path) -> None:
    keys = written(path)
    assert set(keys) <= set(GROUPS[path.parent.name].model_fields)
    GROUPS[path.parent.name].model_validate(keys)
    if path.stem != "default":
        assert len(keys) < len(GROUPS[path.parent.name].model_fields)
        assert compose([f"{path.parent.name}={path.stem}"]) is not None


def test_the_top_file_sets_what_is_no_group() -> None:
    assert set(written(CONF / "config.yaml")) == set(PolarConfig.model_fields) - set(GROUPS)


def test_nothing_said_is_the_defaults_of_the_classes() -> None:
    assert compose() == PolarConfig()


def test_there_is_a_file_for_every_harness_and_every_engine() -> None:
    assert {path.stem for path in (CONF / "harness").glob("*.yaml")} - {"default"} == set(HARNESSES)
    assert {path.stem for path in (CONF / "engine").glob("*.yaml")} - {"default"} == set(ENGINES)


@pytest.mark.parametrize("name", HARNESSES)
def test_picking_a_harness_file_picks_the_harness(name: str) -> None:
    assert compose([f"harness={name}"]).harness.name == name


# --- overrides --------------------------------------------------------------------------------------------------


def test_overrides_pick_files_and_set_values() -> None:
    config = compose(["engine=scripted", "engine.scripts=[fix]", "proxy.max_calls=50", "+budget.agent=9", "data=x"])
    assert (config.engine.kind, config.engine.scripts) == ("scripted", ("fix",))
    assert (config.proxy.max_calls, config.budget.agent, config.data) == (50, 9.0, "x")
    assert config.proxy.keep_alive == PolarConfig().proxy.keep_alive


def test_a_provider_may_have_options_we_never_heard_of() -> None:
    config = compose(["sandbox=docker", "sandbox.provider_options.runtime=runsc"])
    assert (config.sandbox.provider, config.sandbox.provider_options) == ("docker", {"runtime": "runsc"})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("proxy.max_cals=5", "did you mean 'max_calls'"),
        ("+proxy.max_cals=5", "did you mean 'max_calls'"),
        ("enigne=vllm", "did you mean 'engine'"),
        ("budget.zzz=1", "known keys: start, agent, grade, finalise"),
        ("engine=vlm", "did you mean 'vllm'"),
        ("engine=tgi", "there are: default, nemo_rl, scripted"),
        ("proxy.max_calls=many", "proxy.max_calls: Input should be a valid integer"),
        ("engine.kind=tgi", "'text' or 'scripted'"),
        ("proxy.max_calls", "EQUAL"),
        ("budget=[", "no viable alternative"),
        ("trajectory.trained_kinds=[agnt]", "trajectory.trained_kinds.0"),
    ],
)
def test_a_wrong_override_is_refused_with_what_would_be_right(wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([wrong])
    assert said in str(caught.value)


def number(annotation: Any) -> bool:
    """Whether a value of this type may be a number, whatever stands around it."""
    return annotation in (int, float) or any(number(inner) for inner in get_args(annotation))


ANY_NUMBER = ("trajectory.seed",)
NUMBERS = [
    f"{group}.{key}"
    for group, made in GROUPS.items()
    for key, field in made.model_fields.items()
    if number(field.annotation)
]


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ANY_NUMBER])
def test_a_number_that_cannot_be_meant_is_refused_by_name(name: str) -> None:
    group, key = name.split(".")
    for value in (-2, math.nan, math.inf):
        with pytest.raises(ConfigError, match=rf"^{group}\.{key}(\..*)?: "):
            load({group: {key: value}})


def test_the_numbers_of_the_configuration_are_found() -> None:
    assert {"proxy.temperature", "proxy.max_seconds", "sandbox.cpus", "budget.agent", *ANY_NUMBER} <= {*NUMBERS}


@pytest.fixture(scope="module")
def small_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conf/ of one key: quick to compose."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "config.yaml").write_text("concurrency: 1\n", encoding="utf-8")
    return folder


@settings(max_examples=20, deadline=None)
@given(st.text(alphabet="ab'\\${}=, \"[]:é\n#~+%", max_size=12))
@example("/data with spaces/it's,x=1.parquet")
@example("\\")
@example("\\'")
@example("\\\n")
@example("\\${x}")
@example("null")
@example("12")
def test_any_text_survives_as_an_override(small_conf: Path, text: str) -> None:
    assert compose([override("data", text)], small_conf).data == text


def test_other_values_survive_as_overrides() -> None:
    config = compose(
        [
            override("engine.base_urls", ["http://a:1/v1", "http://b:2/v1,x"]),
            override("engine.stream", False),
            override("proxy.top_k", None),
            override("proxy.temperature", 0.25),
            override("store.cache", Path("/some where")),
        ]
    )
    assert config.engine.base_urls == ("http://a:1/v1", "http://b:2/v1,x")
    assert (config.engine.stream, config.proxy.top_k, config.proxy.temperature) == (False, None, 0.25)
    assert config.store.cache == Path("/some where")


def test_composing_inside_another_hydra_app_leaves_it_as_it_was() -> None:
    with initialize_config_dir(str(CONF / "engine"), version_base=None):
        outer = GlobalHydra.instance().hydra
        assert compose(["engine=scripted"]).engine.kind == "scripted"
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()


def test_a_refused_configuration_leaves_hydra_as_it_was() -> None:
    with pytest.raises(ConfigError):
        compose(["engine=nothing"])
    assert not GlobalHydra.instance().is_initialized()


def test_another_folder_can_hold_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("concurrency: 3\nproxy: {max_calls: 7}\n", encoding="utf-8")
    config = compose(config_dir=tmp_path)
    assert (config.concurrency, config.proxy.max_calls) == (3, 7)
    with pytest.raises(ConfigError, match=r"no config\.yaml in"):
        compose(config_dir=tmp_path / "elsewhere")


# --- the classes ------------------------------------------------------------------------------------------------


def test_a_mapping_is_validated_and_frozen() -> None:
    config = load({"harness": {"name": "codex"}, "concurrency": "4"})
    assert (config.harness.name, config.concurrency) == ("codex", 4)
    with pytest.raises(ValidationError, match="frozen"):
        config.concurrency = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_every_wrong_key_of_a_mapping_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"budget": {"agents": 1}, "proxy": {"temperature": "hot"}})
    assert "did you mean 'agent'" in str(caught.value)
    assert "proxy.temperature" in str(caught.value)


def test_trained_kinds_are_read_from_their_words() -> None:
    assert compose(["trajectory.trained_kinds=[agent]"]).trajectory.trained_kinds == (CallKind.AGENT,)


# --- where conf/ is ---------------------------------------------------------------------------------------------


def test_conf_is_found_in_the_checkout() -> None:
    assert conf_dir() == CONF


def test_conf_is_found_in_an_installed_package_and_missed_when_it_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "polar_env"
    package.mkdir(parents=True)
    monkeypatch.setattr(config_module, "__file__", str(package / "config.py"))
    with pytest.raises(ConfigError, match="reinstall"):
        conf_dir()
    (package / "conf").mkdir()
    (package / "conf" / "config.yaml").write_text("concurrency: 1\n", encoding="utf-8")
    assert compose().concurrency == 1


@pytest.mark.e2e
def test_the_wheel_carries_conf_and_everything_beside_the_code(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    built = subprocess.run(
        [uv, "build", "--wheel", "--python", sys.executable, "--out-dir", tmp_path, REPO],
        capture_output=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr.decode()
    (wheel,) = tmp_path.glob("polar_env-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"polar_env/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")} <= names
    package = REPO / "src" / "polar_env"
    beside = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {f"polar_env/{path.relative_to(package)}" for path in beside} <= names
    assert "polar_env/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "conf/"))]


# --- the environment --------------------------------------------------------------------------------------------


def test_a_variable_is_read_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TEST_VALUE", "yes")
    assert environment("POLAR_TEST_VALUE", "no") == "yes"
    monkeypatch.delenv("POLAR_TEST_VALUE")
    assert environment("POLAR_TEST_VALUE", "no") == "no"
    assert environment("POLAR_TEST_VALUE") == ""


def test_an_exported_variable_reaches_the_processes_we_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TEST_VALUE", "old")
    export("POLAR_TEST_VALUE", "new")
    shown = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['POLAR_TEST_VALUE'])"], capture_output=True, check=True
    )
    assert shown.stdout == b"new\n"


def test_a_build_step_gets_its_tools_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given_names = {"PATH": "/bin", "PIP_CERT": "c", "npm_config_cert": "r", "https_proxy": "p", "MY_TOOL_X": "m"}
    secret_names = {"OPENAI_API_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k", "HF_TOKEN": "k", "ANTHROPIC_API_KEY": "k"}
    for name, value in {**given_names, **secret_names}.items():
        monkeypatch.setenv(name, value)
    passed = child_environment("MY_TOOL_")
    assert given_names.items() <= passed.items()
    assert not secret_names.keys() & passed.keys()
    assert "MY_TOOL_X" not in child_environment()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("budget", ["start", "agent", "grade", "finalise"])
def test_a_budget_is_a_number_of_seconds_above_zero(budget: str, value: float) -> None:
    """Anything else would end every rollout as a failure of the sandbox, far from its cause."""
    with pytest.raises(ConfigError, match=f"budget.{budget}"):
        load({"budget": {budget: value}})
