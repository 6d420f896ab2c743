"""Small models and batches for the learner's tests."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from strop.learning import Batch
from strop.models.policy import Policy

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
#: Families with a fused pass, with biases, query norms, tied and untied heads among them.
FUSED = {
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "qwen3, one key head": lambda: transformers.Qwen3Config(**{**SIZES, "num_key_value_heads": 1}, head_dim=16),
}
#: Families that only their own forward can run; dropout in the configuration must not matter.
OTHERS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=512, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5
    ),
    "mistral with a window": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
}
_SPARSE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
#: Mixtures of eight experts, two of which compute a token: softmax and sigmoid routers, groups of experts, biases,
#: shared experts, dense first layers, sliding windows, latent attention and state-space layers among them.
EXPERTS = {
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**_SPARSE, num_experts=8, num_hidden_layers=2, head_dim=8),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_SPARSE,
        num_local_experts=8,
        num_hidden_layers=2,
        head_dim=8,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **_SPARSE,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **_SPARSE,
        moe_shared_expert_intermediate_size=24,
        n_routed_experts=8,
        head_dim=8,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
}


def model(family: str, seed: int = 0, scale: float = 4.0) -> transformers.PreTrainedModel:
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config({**FUSED, **OTHERS, **EXPERTS}[family]()).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def policy(
    family: str = "llama, tied", seed: int = 0, dtype: torch.dtype = torch.float32, fused: bool = True
) -> Policy:
    """A policy over a random model."""
    return Policy(model(family, seed), dtype=dtype, fused=fused)


def batch(
    groups: int = 3,
    members: int = 4,
    prompt: int = 9,
    longest: int = 14,
    seed: int = 0,
    vocab: int = 61,
    turns: int = 1,
) -> Batch:
    """Random groups: a shared prompt each, replies of unequal length, some with the same first tokens, tool tokens
    between turns that carry no loss."""
    rng = np.random.default_rng(seed)
    tokens: list[np.ndarray] = []
    mask: list[np.ndarray] = []
    for _ in range(groups):
        shared = rng.integers(0, vocab, prompt)
        start = rng.integers(0, vocab, 3)
        for member in range(members):
            row, trained = [shared], [np.zeros(prompt, bool)]
            for turn in range(turns):
                reply = rng.integers(0, vocab, rng.integers(1, longest + 1))
                if member % 2 and turn == 0:
                    reply = np.concatenate([start, reply])
                row.append(reply)
                trained.append(np.ones(len(reply), bool))
                if turn < turns - 1:
                    tool = rng.integers(0, vocab, rng.integers(1, 5))
                    row.append(tool)
                    trained.append(np.zeros(len(tool), bool))
            tokens.append(np.concatenate(row))
            mask.append(np.concatenate(trained))
    trained_all = np.concatenate(mask)
    lengths = np.array([len(row) for row in tokens])
    per_sequence = rng.normal(size=len(lengths)).round(3)
    logprobs = -rng.exponential(1.0, len(trained_all))
    return Batch(
        tokens=np.concatenate(tokens).astype(np.int32),
        mask=trained_all,
        advantages=(np.repeat(per_sequence, lengths) * trained_all).astype(np.float32),
        sampler_logprobs=(logprobs * trained_all).astype(np.float32),
        versions=np.where(trained_all, 0, -1).astype(np.int32),
        lengths=lengths.astype(np.int64),
        groups=np.repeat(np.arange(groups), members).astype(np.int64),
        rollouts=tuple(f"{g}-{m}" for g in range(groups) for m in range(members)),
    )


def plain_logprobs(hf_model: torch.nn.Module, made: Batch, temperature: float = 1.0) -> list[torch.Tensor]:
    """Log-probabilities of each sequence's trained tokens, one sequence at a time, by transformers and torch alone."""
    found = []
    for number in range(len(made.lengths)):
        span = made.span(number)
        ids = torch.from_numpy(made.tokens[span].astype(np.int64))
        logits = hf_model(ids[None]).logits[0, :-1].float() / temperature
        mask = torch.from_numpy(made.mask[span][1:])
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask])
    return found
