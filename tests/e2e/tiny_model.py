"""Write a tiny random model of the real Qwen3 architecture, with a real tokenizer and template beside it.

Runs in the vLLM environment (it has torch and transformers): python tiny_model.py TOKENIZER_DIR MODEL_DIR [SEED].
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM


def write(tokenizer: Path, target: Path, seed: int) -> None:
    """2 layers, hidden 128, head size 32 (vLLM's CPU kernels refuse 16), the real vocabulary: 78 MB, under 5 s."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide enough that the next token is a choice, not a lottery over the vocabulary
        bos_token_id=151_643,
        eos_token_id=151_645,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[151_645, 151_643], pad_token_id=151_643)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, target / name)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
