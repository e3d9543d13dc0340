"""Fine-tunes a language model with LoRA and Lightning's Trainer on several workers.

pip install -e '.[adapters]'
gridtrain coordinator                                                              # one terminal
gridtrain worker "$(gridtrain invite)" -- python examples/lightning_trainer.py     # one per worker
"""

from __future__ import annotations

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import gridtrain
from gridtrain.adapters.lightning import GridStrategy
from gridtrain.adapters.loader import GridLoader
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.tools.demo.text_corpus import load_corpus

CONTEXT = 64
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Adapted(L.LightningModule):
    def __init__(self, base: str, grid: gridtrain.Grid) -> None:
        super().__init__()
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model, self._grid = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora), grid
        self.losses: list[float] = []

    def training_step(self, ids_BT: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=ids_BT, labels=ids_BT).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3)
        exchange = gridtrain.LocalSteps(every=5, exchange=gridtrain.GTopK(density=0.1))
        return self._grid.optimizer(inner, self, exchange=exchange)


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this worker."""
    base = small_llama()  # or a name on the Hugging Face Hub
    text = load_corpus().train[:200_000].decode()
    ids_N = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")["input_ids"][0]
    dataset = list(ids_N[: len(ids_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))
    grid = gridtrain.join()
    model, loader = Adapted(base, grid), GridLoader(grid, dataset, batch_size=8, steps=steps)
    L.Trainer(max_epochs=1, strategy=GridStrategy(grid, loader), **QUIET).fit(model, loader)
    return model, model.losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
