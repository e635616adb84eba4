"""What starting NeMo Gym needs besides Ray: our root on its path, venv links, ports, and failures in words."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import nemo_gym
import pytest
import yaml
from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
from omegaconf import DictConfig

from polar_env.gym import CONFIG, ROOT, SERVERS, dataset, launch
from polar_env.gym.venvs import link_venvs

VARIABLE = "NEMO_GYM_EXTRA_ROOTS"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch):
    """Gym extends sys.path and the environment; both are put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_gym_finds_our_servers_once_the_root_is_in_use():
    launch.use_root()
    for server in SERVERS:
        assert nemo_gym._resolve_under_cwd_or_install(f"{server}/app.py").is_file()
    assert nemo_gym._resolve_under_cwd_or_install(CONFIG) == ROOT / CONFIG


def test_roots_that_were_there_stay_and_ours_is_added_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "/theirs")
    launch.use_root()
    launch.use_root()
    assert os.environ[VARIABLE] == f"{ROOT}:/theirs"


def test_each_server_gets_this_interpreter_s_environment(tmp_path: Path):
    for _ in range(2):  # again over links that are there, from another environment perhaps
        link_venvs(tmp_path)
    links = [tmp_path / server / ".venv" for server in SERVERS]
    assert [link.readlink() for link in links] == [Path(sys.prefix)] * 3
    assert all((link / "bin" / "python").exists() for link in links)


def test_a_dead_link_is_replaced(tmp_path: Path):
    link = tmp_path / SERVERS[0] / ".venv"
    link.parent.mkdir(parents=True)
    link.symlink_to("/gone")
    link_venvs(tmp_path)
    assert link.readlink() == Path(sys.prefix)


def test_a_free_port_can_be_listened_on():
    with socket.create_server(("127.0.0.1", launch.free_port())) as listener:
        assert listener.getsockname()[1] > 1023


def test_every_server_of_the_config_is_a_folder_with_an_entry_point():
    config = yaml.safe_load((ROOT / CONFIG).read_text(encoding="utf-8"))
    folders = {
        f"{kind}/{name}": block["entrypoint"]
        for server in config.values()
        for kind, named in server.items()
        for name, block in named.items()
    }
    assert folders == dict.fromkeys(SERVERS, "app.py")
    for folder, entry in folders.items():
        assert (ROOT / folder / entry).is_file()
        assert (ROOT / folder / "requirements.txt").is_file()


def test_gym_itself_reads_our_config_and_finds_the_agent_the_dataset_names():
    launch.use_root()
    settings = DictConfig(
        {
            "config_paths": [str(ROOT / CONFIG)],
            "policy_base_url": "",
            "policy_api_key": "",
            "policy_model_name": "",
            "port_range_low": 5000,
            "port_range_high": 5999,
        }
    )
    parsed = GlobalConfigDictParser().parse(
        GlobalConfigDictParserConfig(skip_load_from_cli=True, initial_global_config_dict=settings)
    )
    agent = parsed[dataset.AGENT["name"]]["responses_api_agents"]["polar_agent"]
    assert agent["resources_server"]["name"] in parsed
    ports = {parsed[name][kind][kind_name]["port"] for name, kind, kind_name in NAMES}
    assert len(ports) == 3
    assert all(5000 <= port <= 5999 for port in ports)


NAMES = (
    ("polar_resources_server", "resources_servers", "polar"),
    ("polar_agent", "responses_api_agents", "polar_agent"),
    ("polar_environment", "environment_servers", "polar_environment"),
)


def test_what_a_shot_server_leaves_in_its_temporary_folder_is_removed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    leaves = "import os, signal, tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with launch.scratch():
        assert os.environ["RAY_TMPDIR"] == tempfile.gettempdir()
        server = subprocess.run([sys.executable, "-c", leaves], capture_output=True, text=True, check=False)
        left = Path(server.stdout.strip())
        assert left.is_dir()
        assert left.parent.name.startswith("polar-gym-")
    assert not left.parent.exists()
    assert {"TMPDIR", "RAY_TMPDIR"} & set(os.environ) == set()
