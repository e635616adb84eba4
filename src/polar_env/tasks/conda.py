"""What the official images were built from, read back: conda environment files and the eval script's install line."""

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.errors import ConfigError


def read_environment(text: str) -> dict[str, Any]:
    """``python`` (minor), ``pip`` and ``requirements`` (exact pins from PyPI) of a conda ``environment.yml``.

    Conda's own line form is ``name=version=build``; a build that names a Python ("py39h06a4308_0") is a Python
    package, which PyPI has under the same name; the rest are libraries that the base interpreter brings itself.
    """
    conda = {m[1]: (m[2], m[3]) for m in re.finditer(r"^\s*- ([\w.-]+)=([\w.!+]+)=(\w+)\s*$", text, re.MULTILINE)}
    pins = re.findall(r"^\s*- ([\w.-]+==[\w.!+]+)\s*$", text, re.MULTILINE)
    if "python" not in conda:
        raise ConfigError("an environment.yml names no python=X.Y.Z=build line; give python and requirements instead")
    packages = [f"{name}=={version}" for name, (version, build) in conda.items() if "py" in build and name != "pip"]
    return {
        "python": ".".join(conda["python"][0].split(".")[:2]),
        "pip": conda["pip"][0] if "pip" in conda else "",
        "requirements": [*packages, *pins],
    }


def environment_of(source: Mapping[str, Any], task_id: str) -> dict[str, Any]:
    """Pins that ``source`` gives: ``environment_yml`` (text) or ``environment_ymls`` (a JSON file, id -> text)."""
    if "environment_yml" in source:
        return read_environment(str(source["environment_yml"]))
    if "environment_ymls" not in source:
        return {}
    path = Path(str(source["environment_ymls"])).expanduser()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return read_environment(json.load(file)[task_id])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{task_id}: no environment in {path}: {type(error).__name__}: {error}") from error


def install_line(eval_script: str) -> str:
    """How the eval script itself installs the project: what it does between activating and placing the tests."""
    after = eval_script.rpartition("conda activate testbed\n")[2]
    lines = after.partition("git checkout ")[0].splitlines()
    return " && ".join(line for line in lines if line.strip())
