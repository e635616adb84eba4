"""The proxy alone with clients of one's own, one harness tried on an endpoint, and logs read back."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout_helpers
from engine_helpers import VllmServer
from finished_helpers import finish, two_turns
from gym_helpers import Gated, Stage
from polar_env.capture import rebuild
from polar_env.cli import main
from polar_env.config import PolarConfig, load
from polar_env.control import send
from polar_env.errors import CaptureError, ConfigError, EngineError
from polar_env.frames import Frame, encode_frame, frames
from polar_env.harness import HARNESSES
from polar_env.segment_log import FILE_NAME
from polar_env.standalone import Trial, catalogue, describe, serve, table, try_harness
from polar_env.types import CallKind, Outcome

POLAR = "import sys; from polar_env.cli import main; sys.exit(main())"
SAMPLED = 9
"""Tokens of one answer of the test engine."""


def configured(tmp_path: Path, url: str, **groups: Any) -> PolarConfig:
    base: dict[str, Any] = {
        "engine": {"base_urls": [url], "connect_timeout": 2.0},
        "harness": {"name": "shell"},
        "store": {"cache": str(tmp_path / "cache"), "sessions": str(tmp_path / "sessions")},
        "data": "embedded",
    }
    return load(base | groups)


def facts(line: str) -> dict[str, str]:
    """``a=1 b=2`` as a mapping."""
    return dict(part.split("=", 1) for part in line.split())


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], **fields}


async def ask(session: dict[str, str], text: str, system: str = "") -> int:
    """One Chat call with a session's own key; the status."""
    body = question(text)
    if system:
        body["messages"].insert(0, {"role": "system", "content": system})
    headers = {"Authorization": f"Bearer {session['key']}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{session['base_url']}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        await reply.read()
        return reply.status


# --- the proxy in this process, ended by real signals -------------------------------------------------------------


@dataclass
class Served:
    """A proxy that is serving: what it said, and how to wait for more."""

    lines: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def line(self) -> dict[str, str]:
        return facts(await asyncio.wait_for(self.lines.get(), 20))


@contextlib.asynccontextmanager
async def serving(config: PolarConfig, *names: str, control: int | None = None) -> AsyncGenerator[Served]:
    served = Served()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(config, names, 0, served.lines.put_nowait, control))
        yield served


async def test_each_session_is_served_with_its_own_key_and_sealed_into_its_own_log(tmp_path: Path):
    async with (
        VllmServer().run() as engine,
        serving(configured(tmp_path, engine.url), "left", "right") as proxy,
    ):
        left, right = await proxy.line(), await proxy.line()
        assert (left["session"], right["session"]) == ("left", "right")
        assert left["key"] != right["key"]
        assert [await ask(left, "one"), await ask(left, "two"), await ask(right, "one")] == [200, 200, 200]
        assert await ask({**left, "key": "guessed"}, "one") == 401
        os.kill(os.getpid(), signal.SIGTERM)
        ends = await proxy.line(), await proxy.line()
    assert [(end["calls"], end["chains"], end["trainable_tokens"], end["holes"]) for end in ends] == [
        ("2", "2", str(2 * SAMPLED), "0"),
        ("1", "1", str(SAMPLED), "0"),
    ]
    ledger = rebuild(Path(ends[0]["log"]))
    assert [len(record.sampled_ids) for record in ledger.records] == [SAMPLED, SAMPLED]
    assert ledger.complete
    assert Path(ends[1]["log"]).name.startswith("right.")


async def test_a_call_in_flight_is_ended_by_the_signal_and_the_engine_is_told(tmp_path: Path):
    async with VllmServer().run() as engine, serving(configured(tmp_path, engine.url), "one") as proxy:
        session = await proxy.line()
        engine.fault = "hang"
        engine.started.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask(session, "hello"))
            await asyncio.wait_for(engine.started.wait(), 20)
            os.kill(os.getpid(), signal.SIGINT)
        assert asking.result() == 410
        end = await proxy.line()
        await asyncio.wait_for(engine.aborted.wait(), 20)
    assert (end["calls"], end["trainable_tokens"], end["holes"]) == ("0", "0", "0")


async def test_a_second_listener_takes_the_trainer_s_orders_with_a_secret_of_its_own(tmp_path: Path):
    async with (
        VllmServer().run() as engine,
        serving(configured(tmp_path, engine.url), "one", control=0) as proxy,
    ):
        door, session = await proxy.line(), await proxy.line()
        assert door["control"] != session["base_url"]
        assert door["secret"] != session["key"]
        await asyncio.to_thread(send, door["control"], door["secret"], "version", version="step-3")
        assert await ask(session, "hello") == 200
        with pytest.raises(ConfigError, match="401"):
            await asyncio.to_thread(send, door["control"], session["key"], "pause")
        os.kill(os.getpid(), signal.SIGTERM)
        end = await proxy.line()
    assert [record.policy_version for record in rebuild(Path(end["log"])).records] == ["step-3"]


async def test_a_secret_that_was_given_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLAR_CONTROL_SECRET", "known to both")
    async with VllmServer().run() as engine, serving(configured(tmp_path, engine.url), "one", control=0) as proxy:
        door = await proxy.line()
        assert set(door) == {"control"}
        assert (await asyncio.to_thread(send, door["control"], "known to both", "pause"))["paused"] is True
        await proxy.line()
        os.kill(os.getpid(), signal.SIGTERM)
        await proxy.line()


async def test_a_session_whose_engine_died_says_so_at_the_end(tmp_path: Path):
    async with VllmServer().run() as engine, serving(configured(tmp_path, engine.url), "one") as proxy:
        session = await proxy.line()
        engine.fault = "gateway"
        assert {await ask(session, f"try {number}") for number in range(6)} == {503}
        os.kill(os.getpid(), signal.SIGTERM)
        end = await proxy.line()
    assert end["outcome"] == Outcome.ENGINE_ERROR


@pytest.mark.parametrize(
    ("harness", "kinds"),
    [
        ("shell", [CallKind.AGENT, CallKind.SIDE]),
        ("mini_swe_agent", [CallKind.AGENT, CallKind.AGENT]),
    ],
)
async def test_calls_are_told_apart_by_the_marks_of_the_harness_asked_for(
    tmp_path: Path, harness: str, kinds: list[CallKind]
):
    config = {"harness": {"name": harness}}
    async with VllmServer().run() as engine, serving(configured(tmp_path, engine.url, **config), "one") as proxy:
        session = await proxy.line()
        await ask(session, "fix it")
        await ask(session, "a title please", system="You are a title generator. Answer with a title.")
        os.kill(os.getpid(), signal.SIGTERM)
        end = await proxy.line()
    assert [record.kind for record in rebuild(Path(end["log"])).records] == kinds
    assert end["trainable_tokens"] == str(kinds.count(CallKind.AGENT) * SAMPLED)


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a/b",), ("a b",), ("",)])
async def test_session_names_that_cannot_name_a_folder_each_are_refused(tmp_path: Path, names: tuple[str, ...]):
    with pytest.raises(ConfigError, match="names a folder"):
        await serve(configured(tmp_path, "http://127.0.0.1:9"), names, 0, print)


async def test_a_port_that_cannot_be_had_is_told_before_the_engine_is_asked(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
                await serve(configured(tmp_path, "http://127.0.0.1:9"), ["one"], port, print)


async def test_an_engine_that_is_not_there_opens_no_session(tmp_path: Path):
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await serve(configured(tmp_path, "http://127.0.0.1:9"), ["one"], 0, print)
    assert not (tmp_path / "sessions").exists()


# --- polar proxy, as a process ------------------------------------------------------------------------------------


async def test_the_command_prints_keys_on_stdout_alone_and_ends_well_on_a_signal(tmp_path: Path):
    sessions = tmp_path / "sessions"
    async with VllmServer().run() as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", POLAR, "-v", "proxy", "--model-url", engine.url, "--session", "one"),
            f"store.sessions={sessions}",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            session = facts((await process.stdout.readline()).decode())
            assert await ask(session, "hello") == 200
            by_path = {**session, "key": "", "base_url": f"{session['base_url']}/s/{session['key']}"}
            assert await ask(by_path, "hello again") == 200
            process.send_signal(signal.SIGTERM)
            out, err = await asyncio.wait_for(process.communicate(), 20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode == 0
    end = facts(out.decode())
    assert (end["calls"], end["holes"]) == ("2", "0")
    assert Path(end["log"]).parent == sessions
    assert session["key"].encode() not in err
    assert not [path for path in sessions.rglob("*") if path.is_file() and session["key"].encode() in path.read_bytes()]


# --- harnesses ----------------------------------------------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def test_every_harness_is_listed_with_its_version_its_wire_and_whether_it_is_here(tmp_path: Path):
    (tmp_path / "harness" / "pi-1.6.0").mkdir(parents=True)
    (tmp_path / "harness" / "codex-0.1.0").mkdir()
    head, *lines = rows(catalogue(tmp_path))
    assert head == ["harness", "version", "wire API", "installed"]
    listed = {line[0]: line[1:] for line in lines}
    assert list(listed) == list(HARNESSES)
    assert listed["pi"] == ["1.6.0", "chat", "yes"]
    assert listed["codex"] == ["0.169.0", "responses", "no: at its first rollout"]
    assert listed["shell"] == ["-", "chat", "nothing to install"]


def test_the_command_lists_what_the_store_has(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["harness", "list", f"store.cache={tmp_path}"]) == 0
    assert rows(capsys.readouterr().out)[1][:2] == ["claude_code", "2.1.332"]


MODULE = '''
from polar_env.harness import HOME, Launch, Report
from polar_env.harness.install import PYTHON, python_mount
from polar_env.types import CallKind, Outcome, WireApi

PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": open(sys.argv[1]).read()}]}
request = urllib.request.Request(os.environ["BASE"] + "/v1/chat/completions", json.dumps(body).encode())
request.add_header("Authorization", "Bearer " + os.environ["KEY"])
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer + chr(10))
"""


class MyHarness:
    name, wire = "mine", WireApi.CHAT

    def __init__(self, config):
        self.turns = config.max_turns

    async def install(self, store):
        return (python_mount(),)

    def launch(self, job):
        path = f"{HOME}/instruction"
        env = {"BASE": job.base_url, "KEY": job.key, "LD_LIBRARY_PATH": "/opt/harness/python/lib"}
        return Launch((PYTHON, "-I", "-S", "-c", PROGRAM, path), env, {path: job.instruction.encode()})

    def classify(self, headers, body):
        return CallKind.AGENT, ""

    def read(self, exit):
        return Report(Outcome.COMPLETED if exit.code == 0 else Outcome.AGENT_ERROR, exit.stderr[-300:])
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A harness of one's own, in a package on sys.path."""
    package = tmp_path / "site" / "my_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "my_mod.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)
    yield "my_pkg.my_mod:MyHarness"
    for name in ("my_pkg", "my_pkg.my_mod"):
        sys.modules.pop(name, None)


async def tried(config: PolarConfig, **trial: Any) -> tuple[int, str]:
    said: list[str] = []
    code = await try_harness(config, Trial(**trial), said.append)
    return code, "\n".join(said)


async def test_a_harness_of_one_s_own_is_tried_on_a_folder_which_stays_as_it_was(tmp_path: Path, own: str):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "answer.txt").write_text("none yet\n", encoding="utf-8")
    async with VllmServer().run() as engine:
        config = configured(tmp_path, engine.url, harness={"name": own})
        code, said = await tried(config, prompt="say something", repo=repo)
        assert engine.requests[-1]["messages"] == [{"role": "user", "content": "say something"}]
    assert code == 0, said
    assert said.startswith("outcome   completed\n")
    assert re.search(r"^0 +agent +- +chat +4 +new +9 +tool_calls +\S+ +yes$", said, re.MULTILINE)
    assert "-none yet\n+I will look." in said
    assert (repo / "answer.txt").read_text(encoding="utf-8") == "none yet\n"
    assert "verdict" not in said
    (log,) = (tmp_path / "sessions").iterdir()
    assert describe(log, config)[0] in said


async def test_without_a_folder_the_harness_works_in_an_empty_one(tmp_path: Path, own: str):
    async with VllmServer().run() as engine:
        code, said = await tried(configured(tmp_path, engine.url, harness={"name": own}), prompt="say something")
    assert code == 0, said
    assert "+++ b/answer.txt" in said


async def test_a_harness_that_fails_says_how_and_the_exit_code_tells(tmp_path: Path):
    shell = {"name": "shell", "command": ("sh", "-c", "echo gone wrong >&2; exit 3")}
    async with VllmServer().run() as engine:
        code, said = await tried(configured(tmp_path, engine.url, harness=shell), prompt="say something")
    assert code == 1
    assert said.startswith("outcome   no_calls: the harness made no model call (exit 3: …gone wrong)")
    assert said.endswith("no change in the repository")


async def test_a_harness_that_cannot_be_installed_says_so_for_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gated, "stage", Stage(), raising=False)
    Gated.stage.gate.set()
    async with VllmServer().run() as engine:
        config = configured(tmp_path, engine.url, harness={"name": "gym_helpers:Gated"})
        code, said = await tried(config, task="polar-env__expiry-2")
    assert code == 1
    assert said.startswith("outcome   sandbox_error: the harness could not be installed: the test has no CLI")


@pytest.mark.e2e
async def test_a_task_is_graded(tmp_path: Path):
    config = await rollout_helpers.settings(tmp_path / "sessions")
    code, said = await tried(config, task="polar-env__expiry-2")
    assert code == 0, said
    assert re.search(
        r"^verdict   resolved \(fail-to-pass (\d+)/\1, pass-to-pass (\d+)/\2\), reward 1$", said, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ({}, "either --task ID or --prompt TEXT"),
        ({"task": "a", "prompt": "b"}, "either --task ID or --prompt TEXT"),
        ({"task": "nobody"}, "no task 'nobody'"),
        ({"prompt": "x", "repo": Path("/nowhere/at/all")}, "--repo /nowhere/at/all is no directory"),
    ],
)
async def test_a_trial_of_nothing_is_refused(tmp_path: Path, trial: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        await tried(configured(tmp_path, "http://127.0.0.1:9"), **trial)


@pytest.mark.parametrize("path", ["my_pkg.my_mod:Nothing", "my_pkg.no_mod:MyHarness", "my_pkg.my_mod:"])
def test_a_wrong_path_to_a_harness_is_one_sentence(capsys: pytest.CaptureFixture[str], own: str, path: str):
    assert main(["harness", "run", path, "--prompt", "x", "--model-url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"polar: harness '{path}'")
    assert said.count("\n") == 1


# --- logs read back -----------------------------------------------------------------------------------------------


def test_a_folder_without_a_log_is_refused(tmp_path: Path):
    with pytest.raises(CaptureError, match="reading the session log"):
        describe(tmp_path, load({}))


@dataclass
class Logged:
    """The log of a session of three calls: bytes of each frame, and what `polar rebuild` makes of others."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def frames(self) -> dict[str, bytes]:
        """By kind and call, in order."""
        made: dict[str, bytes] = {}
        for frame in frames((self.folder / FILE_NAME).read_bytes()):
            assert isinstance(frame, Frame)
            name = f"{frame.kind.name.lower()} {frame.header.get('call_id', '')}".strip()
            made[name] = encode_frame(frame.kind, frame.header, frame.body)
        return made

    def rebuilt(self, *parts: bytes) -> tuple[int, str]:
        (self.folder / FILE_NAME).write_bytes(b"".join(parts))
        return main(["rebuild", str(self.folder)]), self.capsys.readouterr().out


@pytest.fixture
def logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Logged:
    finish(tmp_path, two_turns("s")[:3])
    return Logged(tmp_path / "s", capsys)


UNSEALED = "warning: the log has no seal: its session still runs, or was never closed. "


def test_a_log_that_was_sealed_says_nothing_of_itself(logged: Logged):
    code, said = logged.rebuilt(*logged.frames.values())
    assert code == 0
    assert [line.split()[0] for line in said.splitlines() if line] == ["call", "0", "1", "2", "chain", "0", "1"]


def test_a_log_without_a_seal_is_told_and_can_be_used(logged: Logged):
    code, said = logged.rebuilt(*list(logged.frames.values())[:-1])
    assert code == 0
    assert said.splitlines()[-1] == f"{UNSEALED}3 calls can be read whole; more may have followed"
    assert "damaged" not in said


def test_a_log_that_was_cut_says_so_and_how_much_is_there(logged: Logged):
    parts = logged.frames
    code, said = logged.rebuilt(parts["open"], parts["call s-0000"], parts["call s-0001"][:-1])
    assert code == 1
    assert said.splitlines()[-2:] == [
        "damaged: it ends inside a frame: it was cut, or its process was killed while it wrote. "
        "1 calls can be read whole",
        f"{UNSEALED}1 calls can be read whole; more may have followed",
    ]


def test_a_log_that_was_cut_after_a_call_s_marks_names_the_call(logged: Logged):
    """Its own frame is gone, and another speaks of it."""
    parts = logged.frames
    code, said = logged.rebuilt(parts["open"], parts["call s-0000"], parts["delivered s-0001"], parts["seal"])
    assert code == 1
    assert (
        "damaged: missing, by what is left of it: s-0001; its session was closed with 3 calls. 1 calls can be" in said
    )
    assert "hole: lost_record  the session was sealed with 3 calls, the log holds 1" in said


def test_a_corrupt_frame_names_the_calls_it_took_along(logged: Logged):
    parts = logged.frames
    bad = bytearray(parts["call s-0000"])
    bad[-1] ^= 1
    code, said = logged.rebuilt(*(parts | {"call s-0000": bytes(bad)}).values())
    assert code == 1
    assert said.splitlines()[-1] == (
        "damaged: 1 part of it cannot be read: the bytes are not those written; missing, by what is left of it: "
        "s-0000, s-0001; its session was closed with 3 calls. 1 calls can be read whole"
    )
    assert "hole: lost_record s-0001 the log lost call s-0000, whose ids this call's prompt begins with" in said


def test_a_file_that_is_no_log_is_told_apart_from_an_empty_one(logged: Logged):
    assert logged.rebuilt(b"not a log at all, only text")[0] == 1
    code, said = logged.rebuilt()
    assert (code, said.splitlines()[-1]) == (0, f"{UNSEALED}0 calls can be read whole; more may have followed")


@given(st.data())
def test_a_log_damaged_anywhere_is_never_told_to_be_whole(choice: st.DataObject):
    data = bytearray(_three_calls())
    cut = choice.draw(st.integers(0, len(data) - 1))
    if choice.draw(st.booleans()):
        data[cut] ^= choice.draw(st.integers(1, 255))
    else:
        del data[cut:]
    with TemporaryDirectory() as folder:
        (Path(folder) / FILE_NAME).write_bytes(data)
        said, readable = describe(Path(folder), PolarConfig())
    assert ("damaged:" in said) is not readable
    assert not readable or UNSEALED in said


@cache
def _three_calls() -> bytes:
    with TemporaryDirectory() as folder:
        return (finish(Path(folder), two_turns("s")[:3]).log / FILE_NAME).read_bytes()


def test_columns_are_as_wide_as_their_widest_cell():
    assert table([("a", "long head"), ("wider", "b")]) == "a      long head\nwider  b"
