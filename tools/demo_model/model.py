"""Gemma-3 (text) in plain PyTorch, in the form that trains fastest on a CPU.

The parameter names are those of the HF checkpoint, so exporting is a copy. transformers' own Gemma3ForCausalLM is the
oracle: export.py compares the two.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    sliding_window_pattern: int = 3  # every third layer sees everything, the others the last `sliding_window` tokens
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    sliding_window: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rms_norm_eps: float = 1e-6

    @property
    def layer_types(self):
        return ["full_attention" if (i + 1) % self.sliding_window_pattern == 0 else "sliding_attention"
                for i in range(self.num_hidden_layers)]

    def as_dict(self):
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))  # Gemma scales by 1 + weight
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, is_global):
        super().__init__()
        c = self.config = config
        self.is_global = is_global
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        c = self.config
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, c.num_attention_heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q), cos[:length], sin[:length]).to(v.dtype)
        k = rotate(self.k_norm(k), cos[:length], sin[:length]).to(v.dtype)
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.is_global or length <= c.sliding_window:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.head_dim**-0.5)
        else:
            y = window_attention(q, k, v, c.sliding_window, c.head_dim**-0.5)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def window_attention(q, k, v, window, scale):
    """Each query sees itself and the window - 1 keys before it. Blocks of `window` queries are computed against their
    own and the previous block of keys: 2 * window scores per query instead of `length`. `length` must be a multiple of
    `window`."""
    batch, heads, length, dim = q.shape
    blocks = length // window
    q, k, v = (t.reshape(batch, heads, blocks, window, dim) for t in (q, k, v))
    k_pair = torch.cat([F.pad(k, (0, 0, 0, 0, 1, 0))[:, :, :-1], k], 3)
    v_pair = torch.cat([F.pad(v, (0, 0, 0, 0, 1, 0))[:, :, :-1], v], 3)
    scores = (q @ k_pair.transpose(-1, -2)).float() * scale
    i, j = torch.arange(window)[:, None], torch.arange(2 * window)[None]
    visible = (j <= i + window) & (j > i)
    before_start = (torch.arange(blocks) == 0)[:, None, None] & (j < window)[None]
    scores = scores.masked_fill(~(visible[None] & ~before_start), -1e30)
    return (scores.softmax(-1).to(v_pair.dtype) @ v_pair).reshape(batch, heads, length, dim)


def rotary_table(length, dim, theta):
    frequency = theta ** -(torch.arange(0, dim, 2).double() / dim)
    angle = torch.outer(torch.arange(length).double(), frequency)
    angle = torch.cat([angle, angle], -1)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, is_global):
        super().__init__()
        self.self_attn = Attention(c, is_global)
        self.mlp = MLP(c)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, name + "_layernorm", RMSNorm(c.hidden_size, c.rms_norm_eps))

    def forward(self, x, cos, sin):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3(nn.Module):
    """ids [batch, length] -> hidden [batch, length, hidden]; the tied head is `logits`."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind == "full_attention") for kind in c.layer_types)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = {True: rotary_table(c.max_position_embeddings, c.head_dim, c.rope_theta),
                       False: rotary_table(c.max_position_embeddings, c.head_dim, c.rope_local_base_freq)}
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=c.hidden_size**-0.5)

    def forward(self, ids):
        x = self.embed_tokens(ids) * math.sqrt(self.config.hidden_size)
        for layer in self.layers:
            x = layer(x, *self.rotary[layer.self_attn.is_global])
        return self.norm(x)

    def logits(self, hidden):
        return hidden @ self.embed_tokens.weight.T
