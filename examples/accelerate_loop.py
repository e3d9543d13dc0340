"""Fine-tunes a language model with LoRA and Accelerate.  gridtrain needs only the lines marked `# grid`.

    pip install -e '.[adapters]'
    gridtrain coordinator                                                           # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/accelerate_loop.py    # one per worker

Accelerate prepares the model and the optimizer, but not the loader, which would prefetch a batch and divide
samples among Accelerate's own processes.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import gridtrain  # grid
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.tools.demo.text_corpus import load_corpus

CONTEXT = 64


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this worker."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    base = small_llama()  # or a name on the Hugging Face Hub
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    ids_N = tokenizer(load_corpus().train[:200_000].decode(), return_tensors="pt")["input_ids"][0]
    dataset = list(ids_N[: len(ids_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.LocalSteps(every=5, exchange=gridtrain.GTopK(density=0.1))  # grid
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    model, optimizer = accelerator.prepare(model, optimizer)
    sampler = grid.sampler(dataset, batch_size=8, steps=steps // 5)  # grid: 5 batches in each step of the run
    losses = []
    for ids_BT in DataLoader(dataset, batch_sampler=sampler):
        ids_BT = ids_BT.to(accelerator.device)
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
