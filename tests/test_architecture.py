"""The house rules of polar_env, held as data and checked on the source; and proof that each check can fail."""

from pathlib import Path

import pytest

import architecture_helpers as house
from architecture_helpers import Row, Tree, read_tree

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "src" / "polar_env"

FACTS = ("messages", "fast_json", "verdict", "types", "errors")
DIALECTS = ("proxy.anthropic", "proxy.chat", "proxy.responses", "proxy.gemini")

MIDDLE = ("config", "capture", "trajectory", "reward", "engine", "proxy.server", "tasks", "tasks.*")
"""What a rollout passes through."""

TABLE = (
    # Level 0: facts that cross rooms.
    Row("", 0),
    Row("messages", 0),
    Row("fast_json", 0),
    Row("verdict", 0),
    Row("types", 0, ("messages", "verdict")),
    Row("errors", 0, ("types",)),
    # Level 1: configuration, and the pure middle of the line.
    Row("config", 1, FACTS),
    Row("prefix", 1),
    Row("frames", 1, FACTS),
    Row("conversation", 1, FACTS),
    Row("records", 1, (*FACTS, "prefix")),
    Row("segment_log", 1, (*FACTS, "frames", "conversation", "records")),
    Row("capture", 1, (*FACTS, "frames", "records", "segment_log")),
    Row("trajectory", 1, (*FACTS, "prefix")),
    Row("continuation", 1, FACTS),
    Row("joins", 1, (*FACTS, "prefix")),
    Row("digest", 1, FACTS),
    Row("reward", 1, FACTS),
    Row("bundle", 1, FACTS),
    Row("control", 1, FACTS),
    Row("capacity", 1, FACTS),
    Row("pythons", 1, (*FACTS, "config")),
    Row("steps", 1, FACTS),
    Row("proxy.sse", 1),
    # The rooms' own __init__: protocols, facts and dotted-path tables, which everybody may read.
    Row("proxy", 1, FACTS),
    Row("engine", 1, FACTS),
    Row("sandbox", 1, FACTS),
    Row("tasks", 1, FACTS),
    Row("harness", 1, FACTS),
    Row("grade", 1, FACTS),
    Row("gym", 1, FACTS),
    Row("export", 1, FACTS),
    # Level 2: wire APIs as pure functions (never each other), and the sandbox.
    Row("proxy.render", 2, FACTS),
    *(Row(f"{dialect}_*", 2, (*FACTS, "proxy", "proxy.sse", "proxy.render")) for dialect in DIALECTS),
    *(Row(dialect, 2, (*FACTS, "proxy", "proxy.sse", "proxy.render", f"{dialect}_*")) for dialect in DIALECTS),
    Row("sandbox.janitor", 2, ()),
    Row("sandbox.*", 2, (*FACTS, "config", "sandbox", "sandbox.*")),
    # Level 3: the rooms between which a rollout moves. None of them knows the others, but the grader opens sandboxes.
    Row("proxy.ask", 3, (*FACTS, "capture", "continuation")),
    Row("proxy.attempts", 3, (*FACTS, "proxy")),
    Row("proxy.threads", 3, (*FACTS, "proxy.attempts")),
    Row("proxy.call_ids", 3, FACTS),
    Row("proxy.limits", 3, (*FACTS, "config", "proxy.attempts")),
    Row("proxy.steady", 3, FACTS),
    Row("engine.hold", 3),
    Row("engine.ages", 3),
    Row("engine.fence", 3, (*FACTS, "config", "engine", "engine.hold", "engine.ages")),
    Row("proxy.control", 3, (*FACTS, "engine.fence")),
    Row(
        "proxy.session",
        3,
        (
            *FACTS,
            "config",
            "capture",
            "continuation",
            "engine",
            "engine.hold",
            "proxy",
            "proxy.ask",
            "proxy.attempts",
            "proxy.call_ids",
            "proxy.limits",
            "proxy.threads",
            "proxy.steady",
        ),
    ),
    Row("engine.*", 3, (*FACTS, "config", "capture", "proxy.sse", "engine", "engine.*")),
    Row("tasks.*", 3, (*FACTS, "config", "pythons", "steps", "tasks", "tasks.*")),
    Row("harness.*", 3, (*FACTS, "config", "pythons", "steps", "harness", "harness.*")),
    Row("grade.*", 3, (*FACTS, "config", "sandbox", "sandbox.*", "tasks", "tasks.*", "grade", "grade.*")),
    # Level 4: bytes between aiohttp and the sessions.
    Row(
        "proxy.server",
        4,
        (
            *FACTS,
            "config",
            "capacity",
            "capture",
            "engine",
            "engine.fence",
            "proxy",
            "proxy.sse",
            "proxy.attempts",
            "proxy.control",
            "proxy.session",
        ),
    ),
    # Level 5: the only composer.
    Row("ending", 5, (*FACTS, "grade.*", "harness", "proxy.session", "sandbox.*", "tasks")),
    Row("named", 5, (*FACTS, "config", "engine", "harness")),
    Row(
        "rollout",
        5,
        (
            *FACTS,
            *MIDDLE,
            "bundle",
            "ending",
            "named",
            "harness",
            "grade",
            "grade.*",
            "sandbox",
            "sandbox.*",
            "proxy.session",
        ),
    ),
    # Level 6: the doors. The environment serves rows, so it holds what a server holds: an engine, a proxy, a queue.
    Row("gym.contract", 6, FACTS),
    Row("gym.items", 6, (*FACTS, "gym.contract")),
    Row("gym.rows", 6, (*FACTS, "conversation", "trajectory", "digest", "joins", "gym.contract", "gym.items")),
    Row("verify", 6, (*FACTS, "digest", "reward", "segment_log", "trajectory", "gym.contract", "gym.rows")),
    Row(
        "export.*",
        6,
        (
            *FACTS,
            "config",
            "conversation",
            "segment_log",
            "trajectory",
            "gym.contract",
            "gym.rows",
            "export",
            "export.*",
        ),
    ),
    Row("gym.metrics", 6),
    Row("gym.groups", 6, (*FACTS, "config")),
    Row("gym.flights", 6, (*FACTS, "proxy.session", "gym.groups")),
    Row("gym.orders", 6, (*FACTS, "proxy.control", "gym.groups", "gym.flights")),
    Row("gym.revive", 6, (*FACTS, "config", "segment_log", "trajectory", "gym", "gym.rows")),
    Row(
        "gym.environment",
        6,
        (
            *FACTS,
            *MIDDLE,
            "capacity",
            "grade.*",
            "named",
            "rollout",
            "proxy.control",
            "gym",
            "gym.revive",
            "gym.rows",
            "gym.contract",
            "gym.metrics",
            "gym.groups",
            "gym.flights",
            "gym.orders",
        ),
    ),
    Row("gym.*", 6, (*FACTS, "config", "rollout", "tasks", "proxy.control", "sandbox.janitor", "gym", "gym.*")),
    Row("demo", 6, (*FACTS, "config", "engine", "engine.*", "named", "rollout", "tasks", "tasks.*", "gym", "gym.*")),
    Row(
        "standalone",
        6,
        (*FACTS, *MIDDLE, "joins", "segment_log", "proxy.control", "proxy.session", "harness", "named", "rollout"),
    ),
    Row("recipe", 6, (*FACTS, "config", "tasks", "tasks.*", "gym", "gym.*")),
    Row("submit", 6, (*FACTS, "config")),
    Row("cli_values", 6, (*FACTS, "config")),
    Row("cli_training", 6, (*FACTS, "cli_values", "recipe", "submit")),
    Row(
        "cli",
        6,
        (
            *FACTS,
            "config",
            "control",
            "cli_values",
            "cli_training",
            "tasks",
            "tasks.*",
            "named",
            "rollout",
            "gym",
            "gym.*",
            "demo",
            "standalone",
            "verify",
            "export",
            "export.*",
        ),
    ),
)
"""Who may import whom. The first row that fits a module counts; a row names only rows above it and its own room."""

DOORS = {
    "aiohttp": ("proxy.server", "engine.*"),
    "nemo_gym": ("gym.*", "sandbox.*"),
    "fastapi": ("gym.*",),
    "hydra": ("config",),
    "omegaconf": ("config", "gym.*", "recipe"),
    "ray": ("gym.*",),
    "swebench": ("grade.*",),
    "transformers": ("engine.*",),
    "pyarrow": ("tasks.*", "export.*"),
}
"""Third-party package -> the modules through which it enters."""

PURE = (
    "messages",
    "fast_json",
    "verdict",
    "types",
    "trajectory",
    "reward",
    "prefix",
    "records",
    "frames",
    "conversation",
    "continuation",
    "joins",
    "digest",
    "proxy.sse",
    "proxy.render",
    "proxy.steady",
    "proxy.ask",
    "proxy.threads",
    "engine.vllm_wire",
    "engine.ages",
    "grade.review",
    "grade.phases",
    "grade.results",
    "grade.mutants",
    "gym.contract",
    "gym.items",
    "gym.rows",
    *DIALECTS,
    *(f"{dialect}_*" for dialect in DIALECTS),
)
NO_IO = ("asyncio", "aiohttp", "socket", "subprocess", "os", "io", "threading", "tempfile", "shutil")

WORD = "mo" + "ck"
"""The word no test may contain; spelled so that this file does not."""


@pytest.fixture(scope="module")
def tree() -> Tree:
    return read_tree(PACKAGE)


def plant(root: Path, **files: str) -> Tree:
    """A small package: ``plant(root, proxy__sse="import x")`` writes proxy/sse.py."""
    for name, text in files.items():
        path = root / (name.replace("__", "/").replace("ROOM", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_tree(root)


# --- imports ----------------------------------------------------------------------------------------------------


def test_every_import_between_rooms_is_in_the_table(tree: Tree) -> None:
    assert house.wrong_imports(tree, TABLE) == []


def test_the_table_only_points_upwards(tree: Tree) -> None:
    assert house.unsound_rows(TABLE) == []


def test_there_is_no_import_cycle(tree: Tree) -> None:
    assert house.cycles(tree) == []


def test_third_party_packages_enter_by_their_doors(tree: Tree) -> None:
    assert house.strangers(tree, DOORS) == []


def test_pure_modules_do_no_io(tree: Tree) -> None:
    assert house.impure(tree, PURE, NO_IO) == []


def test_only_config_reads_the_environment(tree: Tree) -> None:
    assert house.environment_readers(tree) == []


def test_rooms_do_not_import_their_members(tree: Tree) -> None:
    assert house.rooms_that_import_members(tree) == []


def test_an_edge_outside_the_table_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, types="", reward="from polar_env import types\nfrom polar_env.rollout import run", rollout="")
    assert house.wrong_imports(bad, TABLE) == ["reward:2: reward may not import rollout"]


def test_an_edge_hidden_in_a_function_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, reward="def late():\n    import polar_env.config\n", config="")
    assert house.wrong_imports(bad, TABLE) == ["reward:2: reward may not import config"]


def test_dialects_may_not_import_each_other(tmp_path: Path) -> None:
    bad = plant(tmp_path, proxy__ROOM="", proxy__chat="", proxy__anthropic="from polar_env.proxy import chat, sse")
    assert house.wrong_imports(bad, TABLE) == ["proxy/anthropic:1: proxy.anthropic may not import proxy.chat"]


def test_a_file_without_a_row_is_found(tmp_path: Path) -> None:
    (finding,) = house.wrong_imports(plant(tmp_path, misc="X = 1"), TABLE)
    assert "misc: no row of the import table" in finding


def test_a_row_that_points_downwards_is_found() -> None:
    table = (Row("types", 0, ("config",)), Row("config", 1, ("types",)), Row("late", 0))
    assert house.unsound_rows(table) == [
        "types: allows config, which is no row above it",
        "late: level 0 below a row of level 1",
    ]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, a="import polar_env.b", b="from polar_env import c", c="from polar_env.a import x")
    assert house.cycles(bad) == ["a -> b -> c -> a"]


def test_a_second_door_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, proxy__server="import aiohttp", harness__pi="from aiohttp import web")
    assert house.strangers(bad, DOORS) == ["harness/pi:1: only proxy.server, engine.* may import aiohttp"]


def test_input_and_output_in_a_pure_module_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, reward="import asyncio\nasync def f(): ...\ntext = open('x').read()\n", capture="import os")
    assert sorted(house.impure(bad, PURE, NO_IO)) == [
        "reward:1: reward is pure and may not import asyncio",
        "reward:2: reward is pure: no async, no files",
        "reward:3: reward is pure: no async, no files",
    ]


@pytest.mark.parametrize("line", ["os.environ['A']", "x = os.getenv('A')", "from os import environ"])
def test_reading_the_environment_elsewhere_is_found(tmp_path: Path, line: str) -> None:
    bad = plant(tmp_path, config=f"import os\n{line}", demo=f"import os\n{line}")
    assert len(house.environment_readers(bad)) == 1
    assert house.environment_readers(bad)[0].startswith("demo:2")


def test_a_script_for_the_sandbox_may_name_the_environment(tmp_path: Path) -> None:
    assert house.environment_readers(plant(tmp_path, demo="SCRIPT = 'import os; os.environ.clear()'")) == []


def test_a_room_that_imports_a_member_is_found(tmp_path: Path) -> None:
    bad = plant(tmp_path, proxy__ROOM="from polar_env.proxy.sse import frame", proxy__sse="")
    assert house.rooms_that_import_members(bad) == ["proxy:1: proxy/__init__.py imports its member proxy.sse"]


# --- size and habits --------------------------------------------------------------------------------------------


def test_files_and_functions_stay_small(tree: Tree) -> None:
    assert house.oversized(tree) == []


def test_broad_excepts_are_few_and_say_why(tree: Tree) -> None:
    every, without_reason = house.broad_excepts(tree)
    assert len(every) <= house.BROAD_EXCEPTS, every
    assert without_reason == []


def test_tasks_live_in_task_groups(tree: Tree) -> None:
    assert house.stray_tasks(tree) == []


def test_no_test_replaces_the_thing_it_tests() -> None:
    assert house.containing(REPO / "tests", WORD) == []


def test_there_is_more_test_than_source() -> None:
    source, tests = house.code_lines(PACKAGE), house.code_lines(REPO / "tests")
    assert tests >= house.TESTS_PER_SOURCE * source, f"{tests} lines of tests for {source} of source"


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    body = "\n".join(f"    x{number} = {number}" for number in range(60))
    bad = plant(tmp_path, big="\n" * 401, wide=f"def f():\n{body}\n")
    assert house.oversized(bad)[:2] == ["big: 401 lines (400)", "wide:1: f has 61 lines (60)"]


def test_a_house_of_middling_functions_is_found(tmp_path: Path) -> None:
    body = "\n".join(f"    x{number} = {number}" for number in range(32))
    bad = plant(tmp_path, a=f"def f():\n{body}\n\n\ndef g():\n{body}\n")
    assert [finding.split(" lines")[0] for finding in house.oversized(bad)] == [
        "the median function has 33.0",
        "one function in ten has more than 33",
    ]


def test_a_broad_except_without_a_reason_is_found(tmp_path: Path) -> None:
    text = "try: ...\nexcept{}: ...\n"
    bad = plant(
        tmp_path,
        bare=text.format(""),
        broad=text.format(" (ValueError, Exception) as error"),
        narrow=text.format(" ValueError"),
        reasoned="try: ...\nexcept Exception:  # noqa: BLE001 - the last resort\n    ...\n",
    )
    every, without_reason = house.broad_excepts(bad)
    assert every == ["bare:2", "broad:2", "reasoned:2"]
    assert [finding.partition(": ")[0] for finding in without_reason] == ["bare:2", "broad:2"]


@pytest.mark.parametrize(
    "call", ["asyncio.create_task(f())", "asyncio.gather(f())", "get_running_loop().create_task(f())"]
)
def test_a_task_outside_a_group_is_found(tmp_path: Path, call: str) -> None:
    assert len(house.stray_tasks(plant(tmp_path, a=f"async def f():\n    {call}\n"))) == 1
    assert house.stray_tasks(plant(tmp_path, a="async def f(group):\n    group.create_task(f())\n")) == []


def test_lines_are_counted_without_blanks_and_comments(tmp_path: Path) -> None:
    plant(tmp_path, a="# why\n\nX = 1  # one\n\n\ndef f(): ...\n", b__c="Y = 2\n")
    assert house.code_lines(tmp_path) == 3


def test_the_banned_word_is_found_in_any_case(tmp_path: Path) -> None:
    plant(tmp_path, test_x=f"ok = 1\nfrom unittest import {WORD.title()}\n")
    assert house.containing(tmp_path, WORD) == ["test_x.py:2"]


# --- the map ----------------------------------------------------------------------------------------------------


def test_the_package_docstring_is_the_map_of_the_tree() -> None:
    drawn = house.map_lines((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert house.off_the_map(PACKAGE, drawn) == []


def test_the_readme_shows_the_same_map() -> None:
    drawn = house.map_lines((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert house.map_lines((REPO / "README.md").read_text(encoding="utf-8")) == drawn


def test_a_map_that_lags_the_tree_is_found(tmp_path: Path) -> None:
    plant(tmp_path, types="", proxy__ROOM="", proxy__sse="", proxy__late="", gym__ROOM="", gym__root__app="", done="")
    text = """
    src/polar_env/
      types.py       facts
      done.py        (planned) there already
      ghost.py       gone
      soon.py        (planned) not there yet
      proxy/         a room
        sse.py       frames
      gym/           the door
        root/        shims

    and prose
    """
    assert house.off_the_map(tmp_path, house.map_lines(text)) == [
        "done.py: it is there; take (planned) off the map",
        "ghost.py: on the map, not in the tree",
        "proxy/late.py: not on the map (one line in src/polar_env/__init__.py and in README.md)",
    ]


def test_a_text_without_a_map_maps_nothing(tmp_path: Path) -> None:
    plant(tmp_path, types="")
    assert house.map_lines("no tree here") == ""
    assert len(house.off_the_map(tmp_path, "")) == 1
