"""The names of a configuration as objects: a harness preset, an engine."""

import pkgutil
from collections.abc import Callable
from typing import cast

from polar_env import engine as engine_room
from polar_env import harness as harness_room
from polar_env.config import HarnessConfig, PolarConfig
from polar_env.engine import Engine
from polar_env.errors import ConfigError
from polar_env.harness import Harness


def make_harness(config: HarnessConfig) -> Harness:
    """The preset named by the configuration. Raises ConfigError: no such preset, or not with these settings."""
    return harness_class(config.name)(config)


def harness_class(name: str) -> Callable[[HarnessConfig], Harness]:
    """The class behind a harness name. Raises ConfigError with the known names."""
    path = harness_room.HARNESSES.get(name, name)
    if ":" not in path:
        raise ConfigError(f"unknown harness {name!r}; known: {', '.join(harness_room.HARNESSES)}, or module:Class")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"harness {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"harness {name!r} names no class; write module:Class")
    return cast("Callable[[HarnessConfig], Harness]", found)


def harness_named(config: HarnessConfig, name: str) -> HarnessConfig:
    """``config`` for a harness of that name: its version, command and arguments are the configured harness's own."""
    other = {"name": name, "version": "", "command": (), "extra_args": ()}
    return config if name == config.name else config.model_copy(update=other)


def make_engine(config: PolarConfig) -> Engine:
    """The engine named by the configuration."""
    return cast("Engine", pkgutil.resolve_name(engine_room.ENGINES[config.engine.kind])(config.engine))
