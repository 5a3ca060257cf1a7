"""The demo model as a torch module for training: Llama, with Hugging Face's names and rotary layout.

The parameter names and the arithmetic equal `LlamaForCausalLM`, so that `state_dict()` is what the engine
loads. Shapes: B sequences, T tokens, S cached and new tokens, D hidden
size, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context_len: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


Cache = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, d] by cos, sin [T, d]; the halves of d form the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, visible: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, D]; visible [B, 1, T, S] or None for plain causal attention without a cache."""
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        groups = self.shape.heads // self.shape.kv_heads
        keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, is_causal=visible is None
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), (k, v)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, visible: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, kept = self.self_attn(self.input_layernorm(x), cos, sin, cache, visible)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Trunk(nn.Module):
    """Everything but the output head; its attribute names give the parameters their names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class DemoModel(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context_len).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                deviation = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=deviation)

    def hidden(
        self, ids: Tensor, cache: Cache | None = None, visible: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """ids [B, T] -> (final hidden states [B, T, D], the grown cache)."""
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        grown: Cache = []
        for index, layer in enumerate(self.model.layers):
            x, kept = layer(x, cos, sin, cache[index] if cache else None, visible)
            grown.append(kept)
        return self.model.norm(x), grown

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., vocab]; the head is the embedding."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], eos_id: int, pad_id: int, tokens_max: int
    ) -> list[list[int]]:
        """Greedy continuations, without the end token. Prompts are padded on the left and masked there;
        rotary positions are relative, so the shift does not matter."""
        width = max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + p for p in prompts])
        real = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        # A padded query sees itself, so that no row of the softmax is empty.
        visible = (causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool)
        hidden, cache = self.hidden(ids, visible=visible[:, None])
        done = torch.zeros(len(prompts), dtype=torch.bool)
        produced: list[Tensor] = []
        while not done.all() and len(produced) < min(tokens_max, self.shape.context_len - width):
            token = self.logits(hidden[:, -1]).argmax(dim=-1)
            token = torch.where(done, eos_id, token)
            done |= token == eos_id
            produced.append(token)
            real = torch.cat((real, torch.ones(len(prompts), 1, dtype=torch.bool)), dim=1)
            hidden, cache = self.hidden(token[:, None], cache, real[:, None, None, :])
        columns = torch.stack(produced, dim=1).tolist()
        return [row[: row.index(eos_id)] if eos_id in row else row for row in columns]
