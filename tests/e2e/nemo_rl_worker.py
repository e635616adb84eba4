"""Serve the HTTP app of a NeMo-RL vLLM worker, from its own source, on a real vLLM of this CPU.

Runs in the vLLM environment: nemo_rl_worker.py GIT_DIR MODEL_DIR PORT. GIT_DIR is a git directory of NVIDIA-NeMo/RL.

NeMo-RL itself cannot be imported there (Ray, Megatron and a GPU build of vLLM hang on it), and needs not be: its app is
one method of the worker that wants an engine and a configuration. That method and the functions it calls are read from
the repository and run as they are; nothing of them is kept here.
"""

import ast
import asyncio
import importlib
import logging
import subprocess
import sys
import textwrap
from typing import Any, Optional

import torch
import uvicorn
from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

GENERATION = "nemo_rl/models/generation"
WANTED = {
    f"{GENERATION}/openai_server_utils.py": ("replace_prefix_tokens",),
    f"{GENERATION}/vllm/utils.py": (
        "attach_token_information_to_chat_response_choices",
        "model_dump_chat_response_with_dynamic_message_fields",
    ),
    f"{GENERATION}/vllm/vllm_worker_async.py": ("_setup_vllm_openai_api_server",),
}


MOVED = {
    "vllm.entrypoints.chat_utils": "vllm.renderers.chat_utils",
    "vllm.entrypoints.openai.engine.protocol": "vllm.entrypoints.serve.engine.protocol",
}
"""Where NeMo-RL's vLLM (0.25) has modules -> where this one (0.32) has them; the rest is where it was."""


class Worker:
    """What the app asks of the worker it belongs to."""

    routed_experts_dtype = None

    def __init__(self, llm: AsyncLLM, engine_args: AsyncEngineArgs) -> None:
        self.llm, self.llm_async_engine_args = llm, engine_args
        self.cfg = {
            "vllm_cfg": {"http_server_serving_chat_kwargs": {"enable_auto_tools": True, "tool_parser": "hermes"}},
            "temperature": 1.0,
            "top_p": 1.0,
            "val_temperature": 0.5,
            "val_top_p": 0.9,
        }

    def _return_routed_experts_enabled(self) -> bool:
        return False


def taken(git_dir: str) -> dict[str, Any]:
    """The wanted functions by name, each compiled from the repository's text."""
    space: dict[str, Any] = {"torch": torch, "FastAPI": FastAPI, "Any": Any, "Optional": Optional}
    space |= {"LOGGER": logging.getLogger("nemo_rl"), "VLLM_LOGPROB_FLOOR": -9999.0}
    for path, names in WANTED.items():
        text = subprocess.check_output(["git", "--git-dir", git_dir, "show", f"HEAD:{path}"], text=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in names:
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                exec(compile(textwrap.dedent("\n".join(lines)), path, "exec"), space)
    return space


async def main(git_dir: str, model: str, port: int) -> None:
    engine_args = AsyncEngineArgs(model=model, dtype="float32", max_model_len=4096, enforce_eager=True)
    llm = AsyncLLM.from_engine_args(engine_args)
    sys.modules.update({old: importlib.import_module(new) for old, new in MOVED.items()})
    app = taken(git_dir)["_setup_vllm_openai_api_server"](Worker(llm, engine_args), FastAPI())
    app.get("/health")(lambda: {"status": "ok"})  # so that the tests see when it is there
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
