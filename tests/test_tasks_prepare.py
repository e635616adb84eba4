"""From a task to a repository and an environment: what is built, how often, and what is left when it fails."""

import asyncio
import gzip
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_env.config import SandboxConfig
from polar_env.errors import ConfigError, SandboxError
from polar_env.pythons import Interpreter
from polar_env.tasks import ENV_PREFIX, Prepared, Task
from polar_env.tasks.conda import environment_of, install_line, read_environment
from polar_env.tasks.embedded_rows import embedded_rows
from polar_env.tasks.environment import find_python
from polar_env.tasks.once import make_once
from polar_env.tasks.prepare import prepare
from polar_env.tasks.process import run
from polar_env.tasks.registry import fetch_sdist, read_settings
from polar_env.tasks.rows import task_of
from polar_env.tasks.sources import git, make_repository, sdist_table
from tasks_helpers import BASE, good_row, make_mirror, make_sdist, make_wheel, spent, swebench_data, use_registry

TREE = {
    "gadget.py": "answer = 41\n",
    "setup.py": "import setuptools\nname = 'gadget'\nname = 'gadget'  # gadget\n",
    "run.sh": "#!/bin/sh\n",
    "gadget.egg-info/PKG-INFO": "generated\n",
    "PKG-INFO": "Name: gadget\n",
}
DATE = {"base_date": "2020-02-03T04:05:06"}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_registry(monkeypatch, tmp_path / "registry")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def python(*argv: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *argv], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout


async def repository(source: dict[str, Any], folder: Path, base: str = BASE) -> str:
    await asyncio.to_thread(folder.mkdir)
    return await make_repository(source, base, folder, folder.parent / "store")


# --- repositories -----------------------------------------------------------------------------------------------


async def test_an_sdist_becomes_the_same_commit_every_time(tmp_path: Path, registry: Path) -> None:
    source = make_sdist(registry, TREE) | DATE
    first = await repository(source, tmp_path / "one")
    os.umask(umask := os.umask(0o077))
    os.umask(0o077)
    try:
        second = await repository(source, tmp_path / "two")
    finally:
        os.umask(umask)
    assert first == second
    assert re.fullmatch("[0-9a-f]{40}", first)
    assert first != await repository(source | {"base_date": "2021-01-01T00:00:00"}, tmp_path / "three")


async def test_the_repository_has_two_commits_its_tag_and_no_trace_of_elsewhere(tmp_path: Path, registry: Path) -> None:
    repo = tmp_path / "repo"
    head = await repository(make_sdist(registry, TREE) | DATE, repo)
    log = await git(repo, "log", "--format=%H %s %an <%ae> %aI", "--all")
    assert log.splitlines()[0] == f"{head} SWE-bench SWE-bench <setup@swebench.config> 2020-02-03T04:05:06+00:00"
    assert len(log.splitlines()) == 2
    assert await git(repo, "tag", "--points-at", "HEAD") == "1.0"
    assert len(await git(repo, "show")) < 400
    assert await git(repo, "remote") == ""
    assert not {"logs", "hooks", "FETCH_HEAD", "ORIG_HEAD"} & {path.name for path in (repo / ".git").iterdir()}
    assert sorted((await git(repo, "ls-files", "-s")).split()[0::4]) == ["100644"] * 3 + ["100755"]


async def test_what_installing_leaves_behind_does_not_show(tmp_path: Path, registry: Path) -> None:
    repo = tmp_path / "repo"
    await repository(make_sdist(registry, TREE), repo)
    assert not (repo / "gadget.egg-info").exists()
    for name in ("gadget.egg-info/x", "__pycache__/x.pyc", "build/lib/x", "dist/x"):
        (repo / name).parent.mkdir(parents=True)
        (repo / name).write_text("left behind")
    assert await git(repo, "status", "--porcelain") == ""


async def test_edits_change_the_first_occurrence_on_each_line(tmp_path: Path, registry: Path) -> None:
    edit = {"file": "setup.py", "old": "gadget", "new": "widget"}
    await repository(make_sdist(registry, TREE) | {"edits": [edit]}, tmp_path / "repo")
    text = (tmp_path / "repo" / "setup.py").read_text()
    assert text == "import setuptools\nname = 'widget'\nname = 'widget'  # gadget\n"
    with pytest.raises(ConfigError, match="editing the tree"):
        await repository(make_sdist(registry, TREE) | {"edits": [edit | {"file": "no.py"}]}, tmp_path / "other")


async def test_sympys_missing_test_runner_runs_the_named_files(tmp_path: Path, registry: Path) -> None:
    fake = (
        "import os\n"
        "def test(*files, verbose):\n"
        "    print(files, verbose, os.environ['SYMPY_USE_CACHE'])\n"
        "    return 'bad' not in files[0]\n"
    )
    source = make_sdist(registry, {"sympy/__init__.py": fake}) | {"shims": ["sympy_test"]}
    await repository(source, tmp_path / "repo")
    runner = tmp_path / "repo" / "bin" / "test"
    assert os.access(runner, os.X_OK)
    for name, code in (("a.py", 0), ("bad.py", 1)):
        assert python(runner, "-C", "--verbose", name) == (code, f"('{name}',) True no\n")


@pytest.mark.parametrize(
    ("evil", "link"), [("gadget-1.0/../../escaped", ""), ("gadget-1.0/out", "../.."), ("gadget-1.0/out", "/etc")]
)
async def test_an_sdist_that_reaches_out_of_its_tree_is_refused(
    tmp_path: Path, registry: Path, evil: str, link: str
) -> None:
    source = make_sdist(registry, TREE, evil=evil, link=link)
    with pytest.raises(SandboxError, match=r"unpacking .*gadget-1\.0\.tar\.gz"):
        await repository(source, tmp_path / "repo")
    assert names(tmp_path) == ["registry", "repo", "store"]
    assert "out" not in names(tmp_path / "repo")


async def test_an_absolute_name_in_an_sdist_lands_in_its_tree(tmp_path: Path, registry: Path) -> None:
    await repository(make_sdist(registry, TREE, evil="gadget-1.0//etc/gadget"), tmp_path / "repo")
    assert names(tmp_path / "repo" / "etc") == ["gadget"]


async def test_an_embedded_task_is_laid_out_under_its_real_names(tmp_path: Path) -> None:
    source = embedded_rows()[0]["polar_source"]
    first = await repository(source, tmp_path / "one")
    assert first == await repository(source, tmp_path / "two")
    assert names(tmp_path / "one") == [".git", ".gitignore", "README.md", "expiry", "pyproject.toml", "tests"]
    assert not list((tmp_path / "one").rglob("*.txt"))


async def test_a_mirror_gives_its_base_commit_and_nothing_later(tmp_path: Path) -> None:
    base, fix = make_mirror(tmp_path / "mirror")
    repo = tmp_path / "repo"
    head = await repository({"kind": "git", "mirror": str(tmp_path / "mirror"), **DATE}, repo, base)
    assert (repo / "gadget.py").read_text() == "answer = 41\n"
    assert (await git(repo, "rev-list", "HEAD")).split() == [head, base]
    objects = await git(repo, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    assert fix not in objects
    assert base in objects
    assert not {"FETCH_HEAD", "logs", "packed-refs"} & {path.name for path in (repo / ".git").iterdir()}


async def test_edits_of_a_mirror_are_its_second_commit(tmp_path: Path) -> None:
    base, _ = make_mirror(tmp_path / "mirror")
    edit = {"file": "gadget.py", "old": "41", "new": "40"}
    repo = tmp_path / "repo"
    await repository({"kind": "git", "mirror": str(tmp_path / "mirror"), "edits": [edit]}, repo, base)
    assert await git(repo, "diff", "--stat", base, "HEAD", "--format=")
    assert await git(repo, "status", "--porcelain") == ""


@pytest.mark.parametrize("mirror", ["", "no/such/mirror"])
async def test_a_mirror_that_is_not_there_is_named(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(ConfigError, match=r"polar_source\.mirror must be a local git repository"):
        await repository({"kind": "git", "mirror": mirror}, tmp_path / "repo")


async def test_a_commit_the_mirror_lacks_is_an_error_with_gits_words(tmp_path: Path) -> None:
    make_mirror(tmp_path / "mirror")
    with pytest.raises(SandboxError, match=r"git fetch .*exit code 128"):
        await repository({"kind": "git", "mirror": str(tmp_path / "mirror")}, tmp_path / "repo")


# --- what the official images were built from -------------------------------------------------------------------

YML = """\
name: testbed
dependencies:
  - _libgcc_mutex=0.1=main
  - certifi=2024.8.30=py39h06a4308_0
  - iniconfig=1.1.1=pyhd3eb1b0_0
  - openssl=3.0.15=h5eee18b_0
  - pip=24.2=py39h06a4308_0
  - python=3.9.20=he870216_1
  - pip:
      - idna==3.10
      - pytz==2023.3.post1
"""


def test_a_conda_file_gives_pythons_pins() -> None:
    assert read_environment(YML) == {
        "python": "3.9",
        "pip": "24.2",
        "requirements": ["certifi==2024.8.30", "iniconfig==1.1.1", "idna==3.10", "pytz==2023.3.post1"],
    }
    with pytest.raises(ConfigError, match="names no python"):
        read_environment("dependencies: []")


def test_an_environment_is_found_by_text_by_file_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ymls.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"acme__gadget-1": YML}).encode()))
    assert environment_of({"environment_ymls": str(path)}, "acme__gadget-1") == read_environment(YML)
    assert environment_of({"environment_yml": YML}, "any")["python"] == "3.9"
    assert environment_of({}, "any") == {}
    with pytest.raises(ConfigError, match="acme__gadget-2: no environment in"):
        environment_of({"environment_ymls": str(path)}, "acme__gadget-2")


def test_every_official_environment_agrees_with_the_sdist_table() -> None:
    ymls = {"environment_ymls": f"{swebench_data()}/verified_environment_ymls.json.gz"}
    verified = [name for name in sdist_table() if name.startswith(("psf", "pytest", "sympy", "sphinx", "django"))]
    for name in verified:
        recipe, official = sdist_table()[name], environment_of(ymls, name)
        assert (recipe["python"], recipe["pip"]) == (official["python"], official["pip"]), name
        ours, theirs = ({p.lower().replace("_", "-") for p in pins["requirements"]} for pins in (recipe, official))
        assert theirs <= ours, name


def test_the_install_line_is_what_the_eval_script_does_before_it_places_tests() -> None:
    activate = "conda activate testbed\n"
    script = f"{activate}cd /testbed\n{activate}./prepare\npip install -e .\ngit checkout b t.py\n"
    assert install_line(script) == "./prepare && pip install -e ."


# --- the registry -----------------------------------------------------------------------------------------------


async def test_an_sdist_is_fetched_once_and_checked_again(tmp_path: Path, registry: Path) -> None:
    source = make_sdist(registry, TREE)
    path = await fetch_sdist(tmp_path / "store", "gadget", source["file"], source["sha256"])
    (registry / source["file"]).unlink()
    assert await fetch_sdist(tmp_path / "store", "gadget", source["file"], source["sha256"]) == path
    path.write_bytes(b"damaged")
    with pytest.raises(SandboxError, match=r"gadget-1\.0\.tar\.gz is not one of them"):
        await fetch_sdist(tmp_path / "store", "gadget", source["file"], source["sha256"])
    assert names(tmp_path / "store") == [path.name]


async def test_an_sdist_comes_from_an_index_as_well_as_from_a_folder(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_sdist(registry, TREE)
    page = tmp_path / "simple" / "gadget"
    await asyncio.to_thread(page.mkdir, parents=True)
    link = f"../../registry/{source['file']}#sha256={source['sha256']}"
    (page / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{link}">{source["file"]}</a></body></html>')
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    path = await fetch_sdist(tmp_path / "store", "gadget", source["file"], source["sha256"])
    assert path.read_bytes() == (registry / source["file"]).read_bytes()


async def test_two_fetches_at_once_do_not_share_a_file(tmp_path: Path, registry: Path) -> None:
    source = make_sdist(registry, TREE)
    fetch = partial(fetch_sdist, tmp_path / "store", "gadget", source["file"], source["sha256"])
    async with asyncio.TaskGroup() as group:
        found = [group.create_task(fetch()) for _ in range(2)]
    assert found[0].result() == found[1].result()
    assert names(tmp_path / "store") == [found[0].result().name]


async def test_other_bytes_than_the_pinned_ones_are_not_used(tmp_path: Path, registry: Path) -> None:
    source = make_sdist(registry, TREE)
    with pytest.raises(SandboxError, match="does not have the sha256 0000"):
        await fetch_sdist(tmp_path / "store", "gadget", source["file"], "0" * 64)
    assert not names(tmp_path / "store")


@given(
    st.dictionaries(
        st.sampled_from(["index-url", "find-links", "cert", "proxy", "retries"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30),
    )
)
def test_any_setting_comes_through_as_pip_prints_it(settings: dict[str, str]) -> None:
    listing = "\n".join(f"global.{key}={value!r}" for key, value in settings.items())
    expected = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings.items()}
    assert read_settings(listing) == expected


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True).filter(lambda name: name not in ("pip", "python"))
VERSIONS = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,2}", fullmatch=True)


@given(st.dictionaries(NAMES, VERSIONS, max_size=6), st.dictionaries(NAMES, VERSIONS, max_size=6))
def test_every_python_package_of_a_conda_file_is_pinned_and_no_library(
    packages: dict[str, str], libraries: dict[str, str]
) -> None:
    libraries = {name: version for name, version in libraries.items() if name not in packages}
    lines = [f"  - {name}={version}=py39h1234_0" for name, version in packages.items()]
    lines += [f"  - {name}={version}=h1234_0" for name, version in libraries.items()]
    found = read_environment("\n".join(["dependencies:", "  - python=3.9.20=he870216_1", *lines]))
    assert found["requirements"] == [f"{name}=={version}" for name, version in packages.items()]


def test_pips_settings_are_read_with_pips_own_precedence() -> None:
    listing = "\n".join(
        [
            ":env:.index-url='https://env.invalid/simple'",
            "global.index-url='https://global.invalid/simple'",
            "global.extra-index-url='\\nfile:///a\\nfile:///b'",
            "global.constraint='/etc/constraints.txt'",
            "install.retries='9'",
            "global.retries='1'",
            "download.cert='/not/for/install'",
            "noise",
        ]
    )
    assert read_settings(listing) == {
        "PIP_INDEX_URL": "https://env.invalid/simple",
        "PIP_EXTRA_INDEX_URL": "file:///a file:///b",
        "PIP_RETRIES": "9",
    }


# --- interpreters -----------------------------------------------------------------------------------------------


async def test_our_own_python_is_found_by_its_minor() -> None:
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = await find_python(minor)
    assert (found.minor, found.prefix) == (minor, Path(sys.base_prefix))
    assert found.usable


async def test_a_python_that_cannot_be_had_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"needs Python 2\.99 .*uv python install 2\.99"):
        await find_python("2.99")


async def test_uv_is_asked_to_install_a_missing_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$2" = install ] || echo {sys.executable}\n')
    uv.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="needs Python"):  # what it gave is another minor: not taken for 2.99
        await find_python("2.99")
    assert (tmp_path / "asked").read_text().splitlines() == [
        "python find --no-project 2.99",
        "python install --quiet 2.99",
        "python find --no-project 2.99",
    ]


def test_the_systems_python_needs_no_mount_and_others_keep_their_path() -> None:
    assert Interpreter("3.9", "3.9.1", Path("/usr")).mounts == ()
    assert Interpreter("3.9", "3.9.1", Path("/opt/py")).mounts == ((Path("/opt/py"), "/opt/py"),)


# --- once between all processes ---------------------------------------------------------------------------------


async def test_many_rollouts_build_once(tmp_path: Path) -> None:
    builds = list[Path]()

    async def build(work: Path) -> None:
        builds.append(work)
        await asyncio.sleep(0)
        (work / "made").touch()

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(make_once(tmp_path / "place", lambda place: (place / "made").exists(), build))
    assert len(builds) == 1
    assert names(tmp_path) == ["place", "place.lock"]


async def test_a_failed_build_leaves_nothing_and_the_next_one_may_succeed(tmp_path: Path) -> None:
    async def fail(work: Path) -> None:
        (work / "half").touch()
        raise SandboxError("no")

    async def build(work: Path) -> None:
        (work / "made").touch()

    with pytest.raises(SandboxError, match="no"):
        await make_once(tmp_path / "place", Path.is_dir, fail)
    assert names(tmp_path) == ["place.lock"]
    await make_once(tmp_path / "place", Path.is_dir, build)
    assert names(tmp_path / "place") == ["made"]


async def test_what_is_there_and_not_whole_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "stale").touch()

    async def build(work: Path) -> None:
        (work / "made").touch()

    await make_once(tmp_path / "place", lambda place: (place / "made").exists(), build)
    assert names(tmp_path / "place") == ["made"]


BUILDER = """
import asyncio, sys
from pathlib import Path
from polar_env.tasks.conda import environment_of, install_line, read_environment
from polar_env.tasks.embedded_rows import embedded_rows
from polar_env.tasks.once import make_once

async def build(work):
    (work / "half").touch()
    print("building", flush=True)
    await asyncio.sleep(600)

asyncio.run(make_once(Path(sys.argv[1]), Path.is_dir, build))
"""


async def test_a_builder_that_was_killed_neither_blocks_nor_litters(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", BUILDER, str(tmp_path / "place"))
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"building\n"

    async def build(work: Path) -> None:
        (work / "made").touch()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # its lock holds as long as it lives
            await make_once(tmp_path / "place", Path.is_dir, build)
    child.kill()
    await child.wait()
    await make_once(tmp_path / "place", Path.is_dir, build)
    assert names(tmp_path) == ["place", "place.lock"]
    assert names(tmp_path / "place") == ["made"]


# --- build steps ------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """True when the process ends within 10 s: a SIGKILL that was sent takes effect a moment later."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10.0)[0])
    finally:
        os.close(handle)


async def test_a_step_past_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(SandboxError, match=r"sleeping: no end after 0\.3 s"):
        await run(("sh", "-c", script), "sleeping", env={"PATH": os.environ["PATH"]}, limit=0.3)
    assert gone(int((tmp_path / "pid").read_text()))


async def test_a_cancelled_step_leaves_no_process(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await run(("sh", "-c", script), "sleeping", env={"PATH": os.environ["PATH"]})
    assert gone(int((tmp_path / "pid").read_text()))


async def test_a_failed_step_says_what_it_was_and_what_it_printed() -> None:
    with pytest.raises(SandboxError, match=r"(?s)trying: exit code 3: .*the last words"):
        await run(("sh", "-c", "echo the last words >&2; exit 3"), "trying", env={"PATH": os.environ["PATH"]})
    with pytest.raises(SandboxError, match="trying: cannot start no-such-program"):
        await run(("no-such-program",), "trying", env={})


# --- images -----------------------------------------------------------------------------------------------------


async def test_an_image_is_handed_to_a_provider_that_runs_images(tmp_path: Path) -> None:
    prepared = await prepare(task_of(good_row()), tmp_path, sandbox=SandboxConfig(provider="docker"))
    assert (prepared.image, prepared.repo, prepared.base_commit) == ("acme/gadget:latest", None, BASE)
    assert prepared.eval_rewrites == ()


async def test_an_official_image_is_preferred_to_our_recipe_where_images_run(tmp_path: Path) -> None:
    row = good_row(instance_id="psf__requests-6028", image="official:latest")
    prepared = await prepare(task_of(row), tmp_path, sandbox=SandboxConfig(provider="docker"))
    assert prepared.image == "official:latest"


async def test_a_task_whose_right_fix_would_be_scored_zero_here_is_refused(tmp_path: Path) -> None:
    """Its tests want packets to vanish: our sandbox does that, another provider does not."""
    task = task_of(good_row(instance_id="psf__requests-2931"))
    assert (await prepare(task, tmp_path, sandbox=SandboxConfig(provider="docker"))).image == "acme/gadget:latest"
    without_image = replace(task, row={**task.row, "image": ""})
    with pytest.raises(ConfigError, match=r"packets to 10\.0\.0\.0/8 to vanish"):
        await prepare(without_image, tmp_path, sandbox=SandboxConfig(provider="docker"))


async def test_a_sif_is_for_apptainer(tmp_path: Path) -> None:
    task = task_of(good_row(polar_source={"kind": "sif", "path": "/images/gadget.sif"}))
    assert (await prepare(task, tmp_path, sandbox=SandboxConfig(provider="apptainer"))).image == "/images/gadget.sif"
    with pytest.raises(ConfigError, match="the docker sandbox cannot run"):
        await prepare(task, tmp_path, sandbox=SandboxConfig(provider="docker"))


async def test_an_image_without_a_provider_for_it_says_what_would_help(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bubblewrap sandbox cannot run.*sandbox\.provider.*polar_source"):
        await prepare(task_of(good_row()), tmp_path, sandbox=SandboxConfig())
    with pytest.raises(ConfigError, match="needs 'image'"):
        await prepare(task_of(good_row(image=...)), tmp_path, sandbox=SandboxConfig(provider="docker"))
    with pytest.raises(ConfigError, match="source kind 'tape' is unknown"):
        await prepare(Task("t", "", good_row(), {"kind": "tape"}), tmp_path, sandbox=SandboxConfig())


# --- the whole of it, on a registry of our own ------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Task]]:
    """A registry folder with tiny packages, and a task that is made from it."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        registry = use_registry(patch, folder / "registry")
        for name, version in (("setuptools", "80.0.0"), ("wheel", "0.44.0"), ("cogs", "1.2")):
            make_wheel(registry, name, version)
        source = make_sdist(registry, TREE) | {
            "requirements": ["setuptools==80.0.0", "cogs==1.2"],
            "install": "mkdir build && cat /proc/sys/kernel/random/uuid > build/id && python -c 'import cogs' && pwd",
            "rewrites": [["tox -- ", "pytest "]],
        }
        yield folder, task_of(good_row(polar_source=source, eval_script=f"git diff {BASE}\ntox -- t.py\n"))


PREPARE = """
import asyncio, json, sys
from pathlib import Path
from polar_env.config import SandboxConfig
from polar_env.tasks.prepare import prepare
from polar_env.tasks.rows import task_of

prepared = asyncio.run(prepare(task_of(json.loads(sys.argv[1])), Path(sys.argv[2]), sandbox=SandboxConfig()))
print((prepared.repo / "build" / "id").read_text())
"""


@pytest.fixture(scope="module")
def ids(shop: tuple[Path, Task]) -> list[str]:
    """What two processes that prepared the same task at the same time found in it."""
    folder, task = shop
    argv = [sys.executable, "-c", PREPARE, json.dumps(dict(task.row)), str(folder / "store")]
    children = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return [child.communicate(timeout=100)[0].strip() for child in children]


async def prepared_again(shop: tuple[Path, Task]) -> Prepared:
    return await prepare(shop[1], shop[0] / "store", sandbox=SandboxConfig())


def test_two_processes_prepare_a_task_once(shop: tuple[Path, Task], ids: list[str]) -> None:
    assert len(ids[0]) == 36
    assert ids[0] == ids[1]
    assert len([path for path in (shop[0] / "store" / "tasks").iterdir() if path.is_dir()]) == 1


async def test_a_prepared_task_is_had_in_a_moment(shop: tuple[Path, Task], ids: list[str]) -> None:
    await prepared_again(shop)
    before = spent()
    prepared = await prepared_again(shop)
    assert spent() - before < 0.5
    assert prepared.repo is not None
    assert (prepared.repo / "build" / "id").read_text().strip() == ids[0]


async def test_what_was_prepared_is_pristine_and_says_how_to_run(shop: tuple[Path, Task], ids: list[str]) -> None:
    prepared = await prepared_again(shop)
    assert prepared.repo is not None
    assert prepared.env is not None
    assert prepared.git_dir is not None
    assert await git(prepared.repo, "rev-parse", "HEAD") == prepared.base_commit
    assert await git(prepared.repo, "status", "--porcelain") == ""
    assert (prepared.git_dir / "HEAD").is_file()
    assert not prepared.git_dir.is_relative_to(prepared.repo)
    assert list(prepared.env.glob("lib/python3*/site-packages/cogs.py"))
    assert f"#!{ENV_PREFIX}/bin/python" in (prepared.env / "bin" / "pip").read_text().splitlines()[0]
    assert prepared.env_vars["PATH"].startswith(f"{ENV_PREFIX}/bin:")


async def test_the_eval_script_is_pointed_at_the_prepared_task(shop: tuple[Path, Task], ids: list[str]) -> None:
    prepared = await prepared_again(shop)
    script = "source /opt/miniconda3/bin/activate\nconda activate testbed\n" + str(shop[1].row["eval_script"])
    for old, new in prepared.eval_rewrites:
        script = script.replace(old, new)
    assert script.splitlines() == [
        f'export VIRTUAL_ENV={ENV_PREFIX} PATH="{ENV_PREFIX}/bin:$PATH"',
        ":",
        f"git diff {prepared.base_commit}",
        "pytest t.py",
    ]


async def test_another_recipe_is_another_place_and_shares_the_pins(shop: tuple[Path, Task], ids: list[str]) -> None:
    source = dict(shop[1].source) | {"install": "echo dirty > new.txt"}
    task = Task(shop[1].task_id, "", shop[1].row, source)
    with pytest.raises(SandboxError, match=r"installing the project changed .*new\.txt"):
        await prepare(task, shop[0] / "store", sandbox=SandboxConfig())
    clean = Task(shop[1].task_id, "", shop[1].row, dict(source) | {"install": ""})
    prepared = await prepare(clean, shop[0] / "store", sandbox=SandboxConfig())
    assert prepared.repo is not None
    assert not (prepared.repo / "build").exists()
    assert len([path for path in (shop[0] / "store" / "envs").iterdir() if path.is_dir()]) == 1
    shutil.rmtree(prepared.repo.parent)


async def test_a_mirrors_task_is_installed_as_its_eval_script_says(
    shop: tuple[Path, Task], ids: list[str], tmp_path: Path
) -> None:
    base, _ = make_mirror(tmp_path / "mirror")
    script = (
        "conda activate testbed\npython -c 'import cogs' && mkdir build && touch build/installed\ngit checkout b t.py\n"
    )
    source = {"kind": "git", "mirror": str(tmp_path / "mirror"), "requirements": shop[1].source["requirements"]}
    task = task_of(good_row(polar_source=source, base_commit=base, eval_script=script))
    prepared = await prepare(task, shop[0] / "store", sandbox=SandboxConfig())
    assert prepared.repo is not None
    assert (prepared.repo / "build" / "installed").exists()
    assert prepared.eval_rewrites[0] == (base, prepared.base_commit)
    assert await git(prepared.repo, "rev-parse", "HEAD~1") == base


async def test_a_damaged_place_is_built_again(shop: tuple[Path, Task], ids: list[str]) -> None:
    prepared = await prepared_again(shop)
    assert prepared.repo is not None
    (prepared.repo.parent / "prepared.json").write_text("{")
    again = await prepared_again(shop)
    assert again.repo == prepared.repo
    assert (prepared.repo / "build" / "id").read_text().strip() != ids[0]


async def test_a_project_that_needs_the_network_to_install_fails_with_its_own_words(
    shop: tuple[Path, Task], ids: list[str]
) -> None:
    source = dict(shop[1].source) | {"install": "python -m pip install gears"}
    task = Task("acme__gadget-9", "", shop[1].row, source)
    with pytest.raises(SandboxError, match=r"(?s)installing the project without network: exit code 1: .*gears"):
        await prepare(task, shop[0] / "store", sandbox=SandboxConfig())
    left = [name for name in names(shop[0] / "store" / "tasks") if "gadget-9" in name]
    assert all(name.endswith(".lock") for name in left)


async def cancelled_while_it_sleeps(task: Task, store: Path) -> None:
    async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
        group.create_task(prepare(task, store, sandbox=SandboxConfig()))
        while not sleepers():  # noqa: ASYNC110 - another process tells nobody that it started
            await asyncio.sleep(0.05)
        limit.reschedule(0.0)


async def test_a_cancelled_preparation_leaves_no_process_and_no_half_made_task(
    shop: tuple[Path, Task], ids: list[str]
) -> None:
    task = Task("acme__gadget-7", "", shop[1].row, dict(shop[1].source) | {"install": "exec sleep 7331"})
    with pytest.raises(TimeoutError):
        await cancelled_while_it_sleeps(task, shop[0] / "store")
    assert not sleepers()
    assert [name for name in names(shop[0] / "store" / "tasks") if "gadget-7" in name and ".lock" not in name] == []


def test_a_killed_preparation_leaves_no_process(shop: tuple[Path, Task], ids: list[str]) -> None:
    source = dict(shop[1].source) | {"install": "echo $$ > build-pid; exec sleep 7331"}
    row = dict(shop[1].row) | {"polar_source": source, "instance_id": "acme__gadget-8"}
    argv = [sys.executable, "-c", PREPARE, json.dumps(row), str(shop[0] / "store")]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers()
    child.send_signal(signal.SIGKILL)
    child.wait()
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()


def sleepers() -> list[str]:
    found = list[str]()
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "cmdline").read_bytes() == b"sleep\x007331\x00"
                and alive(int(entry.name))
            ):
                found.append(entry.name)
        except OSError:
            continue
    return found
