"""Fine-tunes a language model with LoRA in a plain PyTorch loop.  The lines marked `# grid` are gridtrain's.

    pip install -e '.[adapters]'
    gridtrain coordinator                                                       # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/lora_loop.py      # one per worker

Replace `small_llama()` with the name of a model on the Hugging Face Hub, or with its folder.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import gridtrain  # grid
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.tools.demo.text_corpus import load_corpus

CONTEXT = 64
LOCAL_STEPS = 5


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the loss of each batch of this worker."""
    base = small_llama()
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    ids_N = tokenizer(load_corpus().train[:200_000].decode(), return_tensors="pt")["input_ids"][0]
    dataset = list(ids_N[: len(ids_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.LocalSteps(every=LOCAL_STEPS, exchange=gridtrain.GTopK(density=0.1))  # grid
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    losses = []
    for ids_BT in grid.batches(dataset, batch_size=8, steps=steps // LOCAL_STEPS):  # grid: was a DataLoader
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        grid.report(loss=losses[-1])  # grid: for `gridtrain status`
    return model, losses


if __name__ == "__main__":
    print("losses:", main()[1][::10])
