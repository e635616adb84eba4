"""Write a tiny random model of the real Qwen3 architecture, with a real tokenizer and template beside it.

Runs in the vLLM environment (it has torch and transformers): python tiny_model.py TOKENIZER_DIR MODEL_DIR [SEED].

The weights are random but for one channel, which tells the output layer to avoid white space and to end where it may. A
grammar lets JSON have any amount of blanks and an answer any number of calls: forced to call a tool, a random model
would use both to its last token.
"""

import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 151_936
END = 151_645
CHANNEL, LEVEL, DISLIKE, LIKE = 0, 2.0, -20.0, 4.0
"""The channel of the residual stream that is always LEVEL, and the output weights of blanks and of the end on it.

LIKE makes the end win among a grammar's few choices; among the whole vocabulary it is still below one in a thousand.
"""


def blanks(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is white space or has a line break or tab in it."""
    size = min(VOCABULARY, tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in range(size)])
    return [i for i, text in enumerate(texts) if text and (not text.strip() or set(text) & set("\n\r\t"))]


def write(source: Path, target: Path, seed: int) -> None:
    """2 layers, hidden 128, head size 32 (vLLM's CPU kernels refuse 16), the real vocabulary: 156 MB, in seconds."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=151_643,
        eos_token_id=END,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 3  # so that the next token is a choice, not a lottery over the vocabulary
        model.model.embed_tokens.weight[:, CHANNEL] = LEVEL
        model.lm_head.weight[:, CHANNEL] = 0.0
        model.lm_head.weight[blanks(Tokenizer.from_file(str(source / "tokenizer.json"))), CHANNEL] = DISLIKE
        model.lm_head.weight[END, CHANNEL] = LIKE
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[CHANNEL] = 0.0
            layer.mlp.down_proj.weight[CHANNEL] = 0.0
    model.generation_config = GenerationConfig(eos_token_id=[END, 151_643], pad_token_id=151_643)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
