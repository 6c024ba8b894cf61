# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random GGUF files, written by llama.cpp's own writer (the `gguf` package), and the weights they hold."""

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

LAYERS, WIDTH, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
TOKENS = [*sorted(ByteLevel.alphabet()), "he", "ll", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads x head_dim, width] in llama.cpp's order: the two halves of a head interleaved."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path, arch: str = "qwen2", quantization=gguf.GGMLQuantizationType.Q8_0) -> dict[str, np.ndarray]:
    """Writes a model and returns {Hugging Face name: float32 weight that its blocks stand for}."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if arch == "qwen2" else "smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([*[1] * 258, 3, 3, 3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_bos_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_chat_template(CHAT)
    held = {}

    def add(name, hf, value, heads=0):
        stored = permuted(value, heads) if heads and arch == "llama" else value
        if value.ndim == 1:
            writer.add_tensor(name, stored)
            held[hf] = value
            return
        blocks = gguf.quantize(stored, quantization)
        writer.add_tensor(name, blocks, raw_dtype=quantization)
        # What the blocks stand for does not depend on the order of rows.
        held[hf] = gguf.dequantize(gguf.quantize(value, quantization), quantization)

    def matrix(rows, columns):
        return (0.1 * rng.standard_normal((rows, columns))).astype(np.float32)

    add("token_embd.weight", "model.embed_tokens.weight", matrix(len(TOKENS), WIDTH))
    for i in range(LAYERS):
        head_dim = WIDTH // HEADS
        shapes = {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (KV_HEADS * head_dim, WIDTH),
            "attn_v": (KV_HEADS * head_dim, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }
        for own, hf in HF_NAMES.items():
            name, hf = f"blk.{i}.{own}", f"model.layers.{i}.{hf}"
            if own.endswith("norm"):
                add(f"{name}.weight", f"{hf}.weight", (1 + 0.1 * rng.standard_normal(WIDTH)).astype(np.float32))
                continue
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(own, 0)
            add(f"{name}.weight", f"{hf}.weight", matrix(*shapes[own]), heads)
            if arch == "qwen2" and own in ("attn_q", "attn_k", "attn_v"):
                add(f"{name}.bias", f"{hf}.bias", (0.1 * rng.standard_normal(shapes[own][0])).astype(np.float32))
    add("output_norm.weight", "model.norm.weight", np.ones(WIDTH, np.float32))
    add("output.weight", "lm_head.weight", matrix(len(TOKENS), WIDTH))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
