"""A tiny model in a GGUF file, made as SmolLM2 is: Llama with tied embeddings, byte pairs, a chat template."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ Ġ", "u s", "us e", "use r")
TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES))


def make_model() -> Any:
    """Return a model with random weights, large enough to make a difference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(model: Any, path: Path) -> Path:
    """Write ``model`` as llama.cpp does."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(TOKENS))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    for name, token in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors(model).items():
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by GGUF's names; rotary dimensions of queries and keys are interleaved there."""
    config, found = model.config, {"token_embd.weight": model.model.embed_tokens.weight}
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        of_layer = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": interleaved(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": interleaved(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        found |= {f"blk.{number}.{name}.weight": tensor for name, tensor in of_layer.items()}
    return found | {"output_norm.weight": model.model.norm.weight}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    width = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, width, -1).swapaxes(1, 2).reshape(weight.shape)
