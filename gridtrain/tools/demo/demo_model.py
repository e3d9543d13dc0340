"""The demo's model: a GPT over bytes, small enough to learn within a minute on two CPU cores.

    bytes (B, T) -> token + position embedding -> [norm, attention; norm, MLP] x layers -> norm
                 -> logits (B, T, 256), with the head tied to the token embedding

The architecture is GPT-2's (Radford et al., 2019): pre-norm, GELU, learned positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from gridtrain.tools.demo.recipe import SIZES, VOCABULARY, ModelSize


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each with a layer norm before it and a residual connection around
    it."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        d = size.width
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(d)
        self.query_key_value = nn.Linear(d, 3 * d)
        self.attention_out = nn.Linear(d, d)
        self.norm_mlp = nn.LayerNorm(d)
        self.mlp_in = nn.Linear(d, 4 * d)
        self.mlp_out = nn.Linear(4 * d, d)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        heads = self.query_key_value(self.norm_attention(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed.transpose(1, 2).reshape(B, T, D))
        hidden: Tensor = F.gelu(self.mlp_in(self.norm_mlp(x_BTD)))
        out: Tensor = self.mlp_out(hidden)
        return x_BTD + out


class ByteGPT(nn.Module):
    """A byte-level GPT.  The same `seed` gives the same parameters on every worker.

    `SIZES["small"]` has 120,576 parameters, or 0.48 MB of float32 gradient per step.
    """

    def __init__(self, size: ModelSize = SIZES["small"], *, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(TransformerBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Draw the matrices; set biases to 0 and the weights of norms to 1."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                draw_matrix(name, parameter, self.size.layers, generator)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return logits of the next byte, shape (B, T, 256), for byte values of shape (B, T), int64."""
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.token(bytes_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.token.weight)

    def loss(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte."""
        return F.cross_entropy(self(x_BT).flatten(0, 1), y_BT.flatten())


def draw_matrix(name: str, matrix: Tensor, layers: int, generator: torch.Generator | None = None) -> None:
    """Draw a matrix from Normal(0, 0.02), with a smaller deviation where a layer writes into the residual
    stream (GPT-2, section 2.3)."""
    into_residual = "attention_out" in name or "mlp_out" in name
    std = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
    nn.init.normal_(matrix, std=std, generator=generator)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text: (x, y), both (context,) int64, y one byte ahead of x."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"the window's index is {index}; it must be >= 0 and < {len(self)}")
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def evenly_spaced(self, count: int) -> tuple[Tensor, Tensor]:
        """Return x and y of up to `count` windows, spread evenly over the text, each (windows, context)."""
        count = min(count, len(self))
        pairs = [self[i * len(self) // count] for i in range(count)]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
