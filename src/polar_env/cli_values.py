"""What the command line takes: numbers within bounds, files and folders, and the nearest of the words it knows.

Everything here refuses before anything has begun: a number or a path that cannot be meant costs nobody a run.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polar_env.config import nearest
from polar_env.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argparse parser that answers a word it does not know with the nearest one it does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if sys.version_info >= (3, 14):
            options.setdefault("suggest_on_error", False)  # ours does it on every Python
        super().__init__(*args, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"there is no {value!r}; {nearest(str(value), known, 'there are')}")

    def unknown(self, words: Iterable[str]) -> str:
        """What to say of ``words`` that nobody asked for; options are compared with this parser's own."""
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        said = [
            f"{word} ({nearest(word.partition('=')[0], known, 'there are')})" if word.startswith("--") else word
            for word in words
        ]
        return f"unrecognized arguments: {' '.join(said)}"


# --- numbers ----------------------------------------------------------------------------------------------------


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """The argparse type of a whole number from ``low`` to ``high``."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")
        return number

    return read


def seconds(text: str) -> float:
    """The argparse type of a duration: more than nothing, and no ``nan`` or ``inf``."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number


@contextmanager
def named(key: str) -> Generator[None]:
    """Say a refusal of the types here of a configuration's ``key``. Raises ConfigError."""
    try:
        yield
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{key}: {error}") from error


PORT = whole(0, 65535)
COUNT = whole(1)
INDEX = whole(0)


# --- files and folders ------------------------------------------------------------------------------------------


def file_in(text: str) -> Path:
    """The argparse type of a file to read."""
    return _readable(_there(text, "file"), lambda path: not path.is_dir(), "a file is meant")


def folder_in(text: str) -> Path:
    """The argparse type of a folder to read."""
    return _readable(_there(text, "folder"), Path.is_dir, "a folder is meant")


def either_in(text: str) -> Path:
    """The argparse type of a file or a folder to read."""
    return _readable(_there(text, "file or folder"), Path.exists, "")


def file_out(text: str) -> Path:
    """The argparse type of a file to write; its folders are made when it is."""
    path = Path(text)
    if not text or path.is_dir() or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; a file is meant")
    _room(path.absolute().parent, text)
    return path


def folder_out(text: str) -> Path:
    """The argparse type of a folder to write to, made when it is not there."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no folder")
    _room(Path(text).expanduser().absolute(), text)
    return Path(text)


def _there(text: str, what: str) -> Path:
    path = Path(text).expanduser()
    if not text or not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {what} {text!r}")
    return path


def _readable(path: Path, right: Callable[[Path], bool], meant: str) -> Path:
    if not right(path):
        raise argparse.ArgumentTypeError(f"'{path}' is a {'folder' if path.is_dir() else 'file'}; {meant}")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"'{path}' cannot be read: no permission")
    return path


def _room(folder: Path, text: str) -> None:
    """Whether ``folder`` is one, or can be made: the nearest thing that is there must be a folder to write to."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: '{above}' is a file")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: '{above}' cannot be written to")
