"""Real chat templates of many models, from a pinned wheel of the registry, over the real Qwen3 tokenizer.

The wheel is TRL's, which ships the templates of the models it trains as they were published; none is in here. One of
another family is rendered with Qwen3's tokenizer too: what is tested is where its text can be cut.
"""

import copy
import functools
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from engine_helpers import CACHE
from polar_env.engine import tokenizer
from polar_env.engine.splice import Render
from polar_env.engine.tokenizer import Tokenizer

WHEEL = "trl-1.16.0-py3-none-any.whl"
SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"


@functools.cache
def template(name: str) -> str:
    """The template ``name`` of the wheel, which is downloaded once."""
    kept = CACHE / WHEEL
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "-d", str(kept.parent), "trl==1.16.0"], check=True)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == SHA256
    with zipfile.ZipFile(kept) as wheel:
        return wheel.read(f"trl/chat_templates/{name}.jinja").decode()


def words_of(text: str) -> Tokenizer:
    """Qwen3's tokenizer with the chat template ``text``; its 11 MB of vocabulary are loaded once."""
    made = copy.copy(tokenizer.load(tokenizer.fetch(CACHE)))
    made._pretrained = copy.copy(made._pretrained)
    made._pretrained.chat_template = text
    return made


def own_template() -> str:
    """Qwen3's own template."""
    return str(tokenizer.load(tokenizer.fetch(CACHE))._pretrained.chat_template)


def write(text: str, folder: Path) -> Path:
    """The same as a tokenizer directory."""
    source = tokenizer.fetch(CACHE)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": text}), encoding="utf-8")
    (folder / "tokenizer.json").symlink_to(source / "tokenizer.json")
    return folder


def rendering(words: Tokenizer) -> Render:
    async def render(messages, tools):
        return words.render(messages, tools)

    return render
