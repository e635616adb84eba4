"""scripts/bootstrap.py: which Python, how NeMo Gym gets onto it, and what a user is told when it cannot go on."""

import ast
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[1]
SCRIPT = REPO / "scripts" / "bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("polar_bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["polar_bootstrap"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script needs of a checkout: it never touches the one that runs the tests."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    return tmp_path


def start(checkout: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, checkout / "scripts" / "bootstrap.py", *args],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interpreter(folder: Path, name: str, answer: str) -> Path:
    """An executable that answers the probe."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# --- which Python -----------------------------------------------------------------------------------------------


def test_the_best_python_is_the_one_nemo_gym_asks_for_then_the_newest_it_was_run_on(bootstrap: ModuleType) -> None:
    versions = [(3, 11, 7), (3, 14, 2), (3, 12, 1), (3, 13, 14), (3, 13, 0), (3, 9, 18), (3, 13, 15)]
    pythons = [bootstrap.Python(f"/{version}", version, True) for version in versions]
    order = []
    while any(python.version >= (3, 11) for python in pythons):
        best = bootstrap.choose(pythons)
        order.append(best.name)
        pythons.remove(best)
    assert order == ["3.13.15", "3.13.14", "3.13.0", "3.12.1", "3.11.7", "3.14.2"]


def test_a_python_without_venv_is_passed_over(bootstrap: ModuleType) -> None:
    bare, whole = bootstrap.Python("/a", (3, 13, 5), False), bootstrap.Python("/b", (3, 11, 2), True)
    assert bootstrap.choose([bare, whole]) == whole
    with pytest.raises(
        bootstrap.BootstrapError, match=r"3\.13\.5 has no venv module.*apt-get install python3\.13-venv"
    ):
        bootstrap.choose([bare])


def test_with_no_python_the_user_is_told_what_was_seen_and_what_to_install(bootstrap: ModuleType) -> None:
    with pytest.raises(
        bootstrap.BootstrapError, match=r"no Python >= 3\.11 found \(seen: 3\.9\.2\)\. Install Python 3\.13"
    ):
        bootstrap.choose([bootstrap.Python("/usr/bin/python3", (3, 9, 2), True)])
    with pytest.raises(bootstrap.BootstrapError, match="seen: none"):
        bootstrap.choose([])


def test_an_interpreter_is_asked_who_it_is(bootstrap: ModuleType, tmp_path: Path) -> None:
    me = bootstrap.probe(sys.executable)
    assert me.version == sys.version_info[:3]
    assert me.complete
    assert not Path(me.executable).is_relative_to(sys.prefix), "a virtual environment stands for its base interpreter"
    assert bootstrap.probe(str(tmp_path / "missing")) is None
    assert bootstrap.probe(str(interpreter(tmp_path, "shim", "pyenv: python3.12: command not found"))) is None


def test_path_and_pyenv_are_searched(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = interpreter(tmp_path / "bin", "python3.13", "")
    in_pyenv = interpreter(tmp_path / "pyenv" / "versions" / "3.13.20" / "bin", "python3", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert {str(on_path), str(in_pyenv), sys.executable} <= set(bootstrap.candidates())


def test_the_user_may_name_the_python(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = interpreter(tmp_path, "python3.13", json.dumps(["/opt/python", [3, 12, 9], True]))
    assert bootstrap.find_python(str(path)) == bootstrap.Python("/opt/python", (3, 12, 9), True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_python("python3.13").version == (3, 12, 9)
    with pytest.raises(bootstrap.BootstrapError, match="does not run"):
        bootstrap.find_python(str(tmp_path / "nothing"))


def test_a_named_version_is_found_where_path_hides_it(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyenv's shims answer only for the versions that are active."""
    interpreter(tmp_path / "shims", "python3.12", "pyenv: python3.12: command not found")
    answer = json.dumps(["/opt/py312", [3, 12, 77], True])
    interpreter(tmp_path / "pyenv" / "versions" / "3.12.77" / "bin", "python3", answer)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert bootstrap.find_python("python3.12").version == (3, 12, 77)
    assert bootstrap.find_python("3.12").executable == "/opt/py312"
    with pytest.raises(bootstrap.BootstrapError, match=r"POLAR_PYTHON=3\.97 does not run"):
        bootstrap.find_python("3.97")


# --- how NeMo Gym gets onto it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "route"),
    [
        ((3, 13, 14), "plain"),
        ((3, 13, 15), "plain"),
        ((3, 14, 0), "plain"),
        ((3, 13, 13), "target"),
        ((3, 13, 0), "target"),
        ((3, 12, 9), "metadata"),
        ((3, 11, 7), "metadata"),
    ],
)
def test_the_route_follows_from_the_version(bootstrap: ModuleType, version: tuple[int, int, int], route: str) -> None:
    assert bootstrap.route(version) == route
    assert route == "plain" or "nemo-gym declares >= 3.13.14" in bootstrap.ROUTES[route]


def test_the_version_of_nemo_gym_is_stated_once(bootstrap: ModuleType) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"]["gym"]
    assert line.startswith(bootstrap.gym_requirement() + ";")
    assert bootstrap.gym_requirement().startswith("nemo-gym>=")


def test_every_profile_asks_for_extras_that_exist(bootstrap: ModuleType) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {extra for extras in bootstrap.EXTRAS.values() for extra in extras} == set(project["optional-dependencies"])


def test_requirements_come_from_the_packages_own_metadata(bootstrap: ModuleType) -> None:
    needs = bootstrap.requirements_of(sys.executable, "nemo-gym")
    assert any(line.startswith("fastapi") for line in needs)
    assert not [line for line in needs if "extra ==" in line]
    with pytest.raises(bootstrap.BootstrapError, match="--fresh"):
        bootstrap.requirements_of(sys.executable, "no-such-package")


def test_settings_of_pip_are_passed_to_uv(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    certificate = tmp_path / "ca.pem"
    certificate.write_text("", encoding="utf-8")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_CERT", str(certificate))
    found = bootstrap.pip_settings(sys.executable)
    assert found["find-links"] == "/wheels"
    env = bootstrap.uv_env(found)
    assert env["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert env["SSL_CERT_FILE"] == str(certificate)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert bootstrap.uv_env(found)["UV_DEFAULT_INDEX"] == "https://own.example/simple"


def test_children_see_no_other_python_and_fetch_none(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    env = bootstrap.clean_env()
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & env.keys()
    assert env["UV_PYTHON_DOWNLOADS"] == "never"


def test_without_a_writable_home_the_cache_is_in_the_checkout(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert Path(bootstrap.clean_env()["UV_CACHE_DIR"]).is_relative_to(bootstrap.ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "UV_CACHE_DIR" not in bootstrap.clean_env()


# --- doing nothing ----------------------------------------------------------------------------------------------


def test_nothing_is_done_while_nothing_changed(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    venv = checkout / ".venv"
    interpreter(venv / "bin", "python", json.dumps([sys.executable, [3, 13, 0], True]))
    assert not bootstrap.up_to_date(venv, "demo")
    bootstrap.write_stamp(venv, "test", bootstrap.Python(sys.executable, (3, 13, 0), True))
    assert bootstrap.up_to_date(venv, "test")
    assert bootstrap.up_to_date(venv, "demo"), "the extras of the demo are among those of the tests"

    bootstrap.write_stamp(venv, "demo", bootstrap.Python(sys.executable, (3, 13, 0), True))
    assert not bootstrap.up_to_date(venv, "test"), "the tests need more than the demo"
    other = interpreter(checkout, "python3.12", json.dumps(["/opt/python", [3, 12, 9], True]))
    assert not bootstrap.up_to_date(venv, "demo", str(other)), "another Python was named"

    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert not bootstrap.up_to_date(venv, "demo")


def test_a_broken_environment_is_not_up_to_date(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    venv = checkout / ".venv"
    python = interpreter(venv / "bin", "python", json.dumps([sys.executable, [3, 13, 0], True]))
    bootstrap.write_stamp(venv, "demo", bootstrap.Python(sys.executable, (3, 13, 0), True))
    python.unlink()
    assert not bootstrap.up_to_date(venv, "demo")
    (venv / "polar-bootstrap.json").write_text("{", encoding="utf-8")
    assert bootstrap.stamp_of(venv) == {}


# --- when it cannot go on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("error: failed to write to file: No space left on device (os error 28)", "the disk is full"),
        ("error sending request for url\n dns error: failed to lookup address information", "could not be reached"),
        ("Failed to establish a new connection: [Errno 111] Connection refused", "could not be reached"),
        ("invalid peer certificate: UnknownIssuer", "SSL_CERT_FILE"),
        ("x No solution found when resolving dependencies", "not on the configured index"),
        ("PermissionError: [Errno 13] Permission denied: '.venv'", "must be writable"),
        ("Segmentation fault", "--fresh"),
    ],
)
def test_what_a_failed_step_printed_decides_the_advice(bootstrap: ModuleType, printed: str, said: str) -> None:
    advice = bootstrap.advise(printed, "installing packages")
    assert said in advice
    assert "installing packages" in advice


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_an_index_that_does_not_answer_is_called_unreachable(
    bootstrap: ModuleType, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        index = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
    for name in ("PIP_CONFIG_FILE", "UV_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    pip = [sys.executable, "-m", "pip", "install", "--retries", "1", "--index-url", index]
    uv = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        "install",
        "--default-index",
        index,
        "--no-cache",
        "--no-config",
    ]
    where = ["--target", str(tmp_path / "target"), "polar-no-such-package"]
    with pytest.raises(bootstrap.BootstrapError, match="could not be reached while installing it"):
        bootstrap.run([*({"pip": pip, "uv": [*uv, "--python", sys.executable]}[tool]), *where], "installing it")


def test_a_step_shows_its_progress_and_not_its_noise(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "Looking in indexes: https://user:key@mirror.example\nResolved 3 packages\n + torch==2.0\nlast, unfinished"
    bootstrap.run([sys.executable, "-c", f"print({lines!r}, end='')"], "installing it")
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "Resolved 3 packages",
        "last, unfinished",
    ]


def test_too_little_disk_is_said_before_anything_is_done(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bootstrap.NEED_MIB, "demo", 2**40)
    with pytest.raises(bootstrap.BootstrapError, match="MiB free here, about"):
        bootstrap.need_disk("demo")


def test_the_script_fails_with_one_line_and_no_traceback(checkout: Path) -> None:
    process = start(checkout, POLAR_PYTHON="/no/such/python")
    output, _ = process.communicate()
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("polar_env: cannot go on: POLAR_PYTHON=/no/such/python does not run.")
    assert "Traceback" not in output


def test_two_bootstraps_of_one_checkout_wait_for_each_other(checkout: Path) -> None:
    (checkout / ".cache").mkdir()
    with (checkout / ".cache" / "bootstrap.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(checkout, POLAR_PYTHON="/no/such/python")
        assert process.stdout is not None
        assert "waiting for it" in process.stdout.readline()
        assert process.poll() is None
        fcntl.flock(lock, fcntl.LOCK_UN)
    output, _ = process.communicate()
    assert "cannot go on" in output


def test_a_terminated_bootstrap_ends_what_it_started(checkout: Path) -> None:
    """The named Python answers the probe, then hangs when asked to make an environment."""
    slow = interpreter(checkout, "python3.13", "")
    answer = json.dumps([str(slow), [3, 13, 5], True])
    slow.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{answer}'; exit; fi\necho $$ started\nexec sleep 60\n",
        encoding="utf-8",
    )
    process = start(checkout, POLAR_PYTHON=str(slow))
    assert process.stdout is not None
    child = next(int(line.split()[0]) for line in process.stdout if line.endswith("started\n"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "run it again to go on" in output
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# --- the script itself ------------------------------------------------------------------------------------------


def test_the_script_needs_nothing_but_python_3_8() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert not {"tomllib"} & imported


def test_the_makefile_passes_the_demo_its_variables() -> None:
    def printed(*variables: str) -> str:
        argv = ["make", "--no-print-directory", "-n", "demo", *variables]
        return subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    assert re.sub(r"\s+", " ", printed()).strip() == ".venv/bin/polar demo"
    given = printed(
        "HARNESS=codex", "TASK=a__b-1", "ENGINE=vllm", "MODEL_URL=http://h:1/v1", "DATA=/rows with space.parquet"
    )
    assert re.sub(r"\s+", " ", given).strip() == (
        ".venv/bin/polar demo --harness 'codex' --task 'a__b-1' --engine 'vllm' --model-url 'http://h:1/v1' "
        "--data '/rows with space.parquet'"
    )


def test_without_any_python_make_says_what_to_install(tmp_path: Path) -> None:
    for tool in ("make", "sh", "bash"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        ["make", "demo", "PY3="], cwd=REPO, env={"PATH": str(tmp_path)}, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"no Python >= 3.8 runs here: install Python 3.13" in done.stderr


def test_the_default_tests_are_what_a_machine_without_an_engine_can_run() -> None:
    argv = ["make", "--no-print-directory", "-n", "test"]
    printed = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True).stdout
    steps = [line for line in printed.splitlines() if ".venv/bin/" in line]
    assert [step.split()[0].rpartition("/")[2] for step in steps] == ["ruff", "ruff", "pyright", "python"]
    assert '-m "not vllm and not nemo_rl and not slow"' in steps[-1]
    assert "--cov=polar_env" in steps[-1]
    assert "--cov-fail-under=90" in steps[-1]


def ci(checkout: Path, **env: str) -> dict[str, str]:
    """What .ci/run hands to `make test`, in a checkout whose Makefile only tells."""
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(REPO / ".ci" / "run", checkout / ".ci")
    tell = "test:\n\t@env; read line || echo STDIN=closed\n"
    (checkout / "Makefile").write_text(tell, encoding="utf-8")
    passed = {"PATH": os.environ["PATH"], "HOME": str(checkout), **env}
    done = subprocess.run(
        [checkout / ".ci" / "run"], input="typed", env=passed, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_ci_finds_the_rows_beside_the_checkout(tmp_path: Path) -> None:
    rows = tmp_path / "shared" / "data" / "swebench"
    rows.mkdir(parents=True)
    told = ci(tmp_path / "main")
    assert (told["POLAR_SWEBENCH_DATA"], told["CI"], told["STDIN"]) == (str(rows), "true", "closed")


def test_ci_leaves_rows_that_were_named_and_does_without(tmp_path: Path) -> None:
    assert ci(tmp_path / "a" / "main", POLAR_SWEBENCH_DATA="/rows")["POLAR_SWEBENCH_DATA"] == "/rows"
    assert "POLAR_SWEBENCH_DATA" not in ci(tmp_path / "b" / "main")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_a_checkout_becomes_runnable(bootstrap: ModuleType, checkout: Path, minor: str) -> None:
    if bootstrap.named(minor) is None:
        pytest.skip(f"no python{minor} here")
    for name in ("src", "conf"):
        shutil.copytree(REPO / name, checkout / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(REPO / name, checkout)
    process = start(checkout, POLAR_PYTHON=f"python{minor}")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "is ready" in output
    again, _ = start(checkout, POLAR_PYTHON=f"python{minor}").communicate()
    assert again.strip().startswith("polar_env: .venv is up to date")
