"""A Llama over bytes and LoRA for it, in plain torch, so that each rival's environment can train it.

    bytes (B, T) -> embedding -> [RMS norm, rotary attention; RMS norm, SwiGLU] x layers -> RMS norm -> logits

Architecture: Touvron et al. 2023, section 2.2.  LoRA: Hu et al. 2021, on all linear layers of the blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridtrain.tools.demo.recipe import VOCABULARY

ROTARY_BASE = 10_000.0


class Block(nn.Module):
    """Rotary causal self-attention and a SwiGLU, each with a norm before it and a residual connection."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, turn_TH: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        normed = self.norm_attention(x_BTD)
        query, key, value = (
            project(normed).view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(query, turn_TH), rotated(key, turn_TH), value, is_causal=True
        )
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        normed = self.norm_mlp(x_BTD)
        down: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x_BTD + down


def rotated(heads_BATE: Tensor, turn_TH: Tensor) -> Tensor:
    """Rotate each pair (e, e + E / 2) of (B, A, T, E) by its angle of (T, E / 2): Su et al. 2021."""
    first, second = heads_BATE.chunk(2, dim=-1)
    cos, sin = turn_TH.cos(), turn_TH.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class ByteLlama(nn.Module):
    """A Llama with separate weights of embedding and head, all drawn from the seed."""

    def __init__(self, width: int, hidden: int, layers: int, heads: int, context: int, *, seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        pairs_H = torch.arange(0, width // heads, 2) * heads / width
        turn_TH = torch.outer(torch.arange(context), ROTARY_BASE**-pairs_H)
        self.register_buffer("turn_TH", turn_TH, persistent=False)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        x_BTD = self.token(bytes_BT)
        turn_TH = self.turn_TH[: bytes_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD, turn_TH)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


class LoRALinear(nn.Module):
    """A frozen linear layer W and a trained update of rank r: y = x W' + x A' B' * alpha / r."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down_RI = nn.Parameter(torch.empty(rank, base.in_features))
        self.up_OR = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down_RI, a=5**0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        low_rank = F.linear(F.linear(x, self.down_RI), self.up_OR)
        out: Tensor = self.base(x) + low_rank * self.scale
        return out


def with_lora(model: ByteLlama, rank: int, alpha: float, *, seed: int) -> ByteLlama:
    """Freeze the model and add LoRA to all linear layers of its blocks."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRALinear(layer, rank, alpha, generator))
    return model
