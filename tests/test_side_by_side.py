"""Tests that would disturb each other do not run at the same time."""

from pathlib import Path

from side_by_side_helpers import kind

TESTS = Path(__file__).parent


def test_files_that_start_ray_wait_for_each_other_and_so_do_those_that_start_docker():
    of_ray = {kind(TESTS / "e2e" / f"test_{name}.py") for name in ("demo", "gym", "ray_job", "workers")}
    of_docker = {kind(TESTS / name) for name in ("e2e/test_harbor.py", "test_sandbox_conformance.py")}
    assert [len(of_ray), len(of_docker), len(of_ray | of_docker)] == [1, 1, 2]
    assert "" not in of_ray | of_docker


def test_other_files_run_beside_any():
    assert [kind(TESTS / name) for name in ("e2e/test_rollout.py", "test_sandbox.py", "test_reward.py")] == [""] * 3
