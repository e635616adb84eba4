"""Write a tiny random model of the real Qwen3 architecture, with a real tokenizer and template beside it.

Runs in the vLLM environment (it has torch and transformers): tiny_model.py TOKENIZER_DIR MODEL_DIR [SEED] [agent].

The weights are random but for one channel, which tells the output layer to avoid white space and to end where it may. A
grammar lets JSON have any amount of blanks and an answer any number of calls: forced to call a tool, a random model
would use both to its last token.

With ``agent`` it also has habits, set in its weights and not in how it is sampled: after a token of CHAIN it likes the
ones that follow it there, whatever came before. So it thinks a few words and calls ``bash`` by itself, in a spelling of
JSON that no template writes. Which word, which command, one call or two: a real choice, which the context moves.
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

WORDS = (1401, 518, 279, 3542, 323, 1744, 1549, 358, 1265, 1779, 419, 432, 1431, 1598, 3210, 1588)
""" look at the files and think again I should check this it now run command here"""
COMMANDS = (4730, 25565, 1028, 2940, 307)
"""ls pwd date df id"""
CHAIN: dict[tuple[int, ...], dict[int, float]] = {
    (198,): {151667: 0.0},  # the end of the generation prompt -> <think>
    (151667,): dict.fromkeys(WORDS, 0.0),
    WORDS: {**dict.fromkeys(WORDS, 0.0), 151668: 1.5},  # </think>
    (151668,): {271: 0.0},
    (271,): {151657: 0.0},  # <tool_call>
    (151657,): {4913: 0.0},  # {"
    (4913,): {606: 0.0},  # name
    (606,): {788: 0.0},  # ":
    (788,): {1: 0.0},  # "
    (1,): {46216: 0.0},  # bash
    (46216,): {2198: 0.0},  # ","
    (2198,): {16370: 0.0},  # arguments
    (16370,): {22317: 0.0},  # ":{"
    (22317,): {5631: 0.0},  # command
    (5631,): {3252: 0.0},  # ":"
    (3252,): dict.fromkeys(COMMANDS, 0.0),
    COMMANDS: {30975: 0.0},  # "}}
    (30975,): {151658: 0.0},  # </tool_call>
    (151658,): {END: 0.0, 151657: -2.0},
}
"""Tokens -> the ones that may follow them, with log-odds between those."""
FIRST, STATE, HABIT = 8, 6.0, 5.5
"""The first of one channel per entry of CHAIN, what its tokens put there, and the output weight of their followers."""


def blanks(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is white space or has a line break or tab in it."""
    size = min(VOCABULARY, tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in range(size)])
    return [i for i, text in enumerate(texts) if text and (not text.strip() or set(text) & set("\n\r\t"))]


def form_habits(model: Qwen3ForCausalLM) -> None:
    """CHAIN as weights. Attention and the rest of the 128 channels stay random: they move the choices."""
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    own = slice(FIRST, FIRST + len(CHAIN))
    head[sorted({token for followers in CHAIN.values() for token in followers})] *= 0.25
    embed[:, own] = 0.0
    head[:, own] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[own] = 0.0
        layer.mlp.down_proj.weight[own] = 0.0
    for channel, (tokens, followers) in enumerate(CHAIN.items(), FIRST):
        embed[list(tokens), channel] = STATE
        for token, odds in followers.items():
            head[token, CHANNEL] = 0.0
            head[token, channel] = HABIT + odds / 10  # the norm leaves about 10 of STATE


def write(source: Path, target: Path, seed: int, agent: bool = False) -> None:
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
        if agent:
            form_habits(model)
    model.generation_config = GenerationConfig(eos_token_id=[END, 151_643], pad_token_id=151_643)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0, "agent" in sys.argv[4:])
