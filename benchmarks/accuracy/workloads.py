"""The workloads: models that learn within minutes on two cores, with data that is available offline.

A workload has a model, data, a held-out measure and the settings of each optimizer family, which are the same
for gridtrain and rivals.

    gpt       the demo's byte GPT on its text                                         120,576 parameters
    lstm      two LSTM layers over bytes of the same text (the paper's LSTM, small)   about 300 k
    gpt-10m   the demo's GPT, six layers of width 384                               10.8 M
    llama-30m a Llama over the same bytes, nine layers of width 512                   30.9 M
    lora-114m LoRA of rank 16 on a frozen random Llama, twelve layers of width 768    3.4 M trained of 117 M
    resnet    ResNet-20 on scikit-learn's digits (8 x 8 pixels, 1,797 real images)    about 272 k
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from accuracy.llama import ByteLlama, with_lora
from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.recipe import HELD_OUT_WINDOWS, SIZES, VOCABULARY, ModelSize
from gridtrain.tools.demo.text_corpus import load_corpus

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an optimizer family, the same for gridtrain and rivals.

    The learning rates are the best ones of a common grid: results/accuracy_tuning.json, by `accuracy.tune`.
    """

    optimizer: str  # "sgd" or "adamw"
    learning_rate: float
    momentum: float = 0.0
    clip_norm: float = 1.0

    def at(self, learning_rate: float | None) -> Settings:
        """Return these settings with another learning rate, if one is given."""
        return self if learning_rate is None else replace(self, learning_rate=learning_rate)

    def build(self, model: nn.Module, momentum: bool = True) -> torch.optim.Optimizer:
        """Make the optimizer; without momentum if the exchange has it."""
        trained = trained_of(model)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=self.learning_rate)
        return torch.optim.SGD(trained, lr=self.learning_rate, momentum=self.momentum if momentum else 0.0)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Workload(ABC):
    """A model with its data and settings.

    Attributes:
        batch_size: samples of one worker in a step.
        target: the held-out loss at which a run ends.
        settings: by family: "dense" (plain gradients, every step), "sparse" (DGC), "local" (LocalSteps).
        gathered: for the local families: local steps of an exchange ("8/2": 2 of them overlap with the
            previous exchange), and its density.
    """

    name: str
    batch_size: int
    target: float
    settings: dict[str, Settings]
    gathered: ClassVar[dict[str, tuple[int | str, float | str]]] = {"local": (8, 0.1), "local-sgd": (8, 0.1)}
    train: Dataset[Pair]

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Make the model; equal seeds give equal parameters on all machines."""

    @abstractmethod
    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy of a batch."""

    @abstractmethod
    def held_out(self, model: nn.Module) -> float:
        """Return the mean cross entropy of the fixed samples that are not trained on."""


class _Text(Workload):
    context = 64
    held_out_windows = HELD_OUT_WINDOWS

    def __init__(self) -> None:
        corpus = load_corpus()
        self.train = Windows(corpus.train, self.context)
        self._held_out = Windows(corpus.held_out, self.context).evenly_spaced(self.held_out_windows)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        return float(self.loss(model, *self._held_out))


class Gpt(_Text):
    name, batch_size, target = "gpt", 8, 2.35
    settings: ClassVar = {
        "dense": Settings("sgd", 0.2, 0.9),
        "sparse": Settings("sgd", 0.4, 0.9),
        "local-sgd": Settings("sgd", 0.2, 0.9),
        "local": Settings("adamw", 0.003),
        "adamw": Settings("adamw", 0.003),
    }
    gathered: ClassVar = {"local": (4, 0.1), "local-sgd": (8, 0.1)}

    def model(self, seed: int) -> nn.Module:
        return ByteGPT(SIZES["small"], seed=seed)


class Gpt10M(_Text):
    name, batch_size, target = "gpt-10m", 4, 2.2
    settings: ClassVar = {"adamw": Settings("adamw", 0.001), "local": Settings("adamw", 0.001)}
    gathered: ClassVar = {"local": (16, "density=0.02,values=int8")}

    def model(self, seed: int) -> nn.Module:
        return ByteGPT(ModelSize(width=384, layers=6, heads=6, context=self.context), seed=seed)


class Llama30M(_Text):
    name, batch_size, target, held_out_windows = "llama-30m", 2, 2.4, 64
    settings: ClassVar = {"adamw": Settings("adamw", 0.001), "local": Settings("adamw", 0.001)}
    gathered: ClassVar = {"local": (16, "density=0.02,values=int8")}

    def model(self, seed: int) -> nn.Module:
        return ByteLlama(512, 1536, layers=9, heads=8, context=self.context, seed=seed)


class Lora114M(_Text):
    """LoRA on a random frozen base, which costs as many bytes as a trained one."""

    name, batch_size, target, held_out_windows = "lora-114m", 2, 2.8, 32
    settings: ClassVar = {"adamw": Settings("adamw", 0.003), "local": Settings("adamw", 0.003)}
    gathered: ClassVar = {"local": (8, "density=0.1,values=int8")}

    def model(self, seed: int) -> nn.Module:
        base = ByteLlama(768, 3072, layers=12, heads=12, context=self.context, seed=seed)
        return with_lora(base, rank=16, alpha=32.0, seed=seed + 1)


class ByteLSTM(nn.Module):
    """Embedding, two LSTM layers, a head: the shape of the paper's LSTM-PTB, over bytes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        hidden_BTH, _ = self.lstm(self.token(bytes_BT))
        logits: Tensor = self.head(hidden_BTH)
        return logits


class Lstm(_Text):
    name, batch_size, target = "lstm", 8, 2.15
    settings: ClassVar = {
        "dense": Settings("sgd", 1.5, 0.9),
        "sparse": Settings("sgd", 1.5, 0.9),
        "local-sgd": Settings("sgd", 1.5, 0.9),
        "local": Settings("adamw", 0.02),
        "adamw": Settings("adamw", 0.01),
    }
    gathered: ClassVar = {"local": (8, 0.2), "local-sgd": (8, 0.1)}

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return ByteLSTM(64, 128)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al. 2016, option A: no parameters in it)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self._stride, self._more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, :, :: self._stride, :: self._stride]
        if self._more:
            short = F.pad(short, (0, 0, 0, 0, self._more // 2, self._more - self._more // 2))
        inside = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inside + short)


class ResNet20(nn.Module):
    """He et al. 2016, section 4.2, n = 3: three groups of three blocks, 16, 32 and 64 channels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(BasicBlock(*width) for width in widths))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


class ResNet(Workload):
    name, batch_size, target = "resnet", 16, 0.10
    settings: ClassVar = {
        "dense": Settings("sgd", 0.1, 0.9, clip_norm=5.0),
        "sparse": Settings("sgd", 0.1, 0.9, clip_norm=5.0),
        "local-sgd": Settings("sgd", 0.1, 0.9, clip_norm=5.0),
        "local": Settings("adamw", 0.003),
        "adamw": Settings("adamw", 0.001),
    }
    gathered: ClassVar = {"local": (8, 0.1), "local-sgd": (4, 0.1)}
    HELD_OUT = 297

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from None
        digits = load_digits()
        x = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        y = torch.from_numpy(digits.target)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        self._held_out = x[order[: self.HELD_OUT]], y[order[: self.HELD_OUT]]
        self.train = TensorDataset(x[order[self.HELD_OUT :]], y[order[self.HELD_OUT :]])

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return ResNet20()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        """Return the loss in evaluation mode, with the running averages of batch norm."""
        model.eval()
        try:
            return float(self.loss(model, *self._held_out))
        finally:
            model.train()


WORKLOADS: dict[str, type[Workload]] = {
    each.name: each for each in (Gpt, Gpt10M, Llama30M, Lora114M, Lstm, ResNet)
}
