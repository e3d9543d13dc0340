"""Fine-tunes a language model with LoRA jointly on all workers; only the adapters are trained and exchanged.

Each worker loads the same base, from the Hugging Face Hub by name or from a folder.  Without a base, all
workers use a small Llama with random weights, and nothing is downloaded.  The text comes with this script.
At the end, the first worker writes the adapter; `python generate.py` loads it with PEFT.

The lines marked `# grid` are the only changes to an ordinary PyTorch loop.
"""

from __future__ import annotations

from pathlib import Path

import gridtrain  # grid
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gridtrain.tools.demo.small_llama import small_llama

BASE = ""  # such as "Qwen/Qwen3-0.6B"; "" is the small Llama
TEXT = Path(__file__).with_name("text.txt")
CONTEXT, BATCH = 64, 8  # tokens in a sample; samples in a batch on each worker
LEARNING_RATE = 5e-3  # about 2e-4 for a base with billions of parameters
EXCHANGES, LOCAL_STEPS = 30, 10  # batches per exchange on each worker: docs/local-steps.md


def main() -> None:
    torch.set_num_threads(1)  # workers on one machine share its cores; leave it out for a large model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = BASE or small_llama()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
        model = get_peft_model(model, lora).to(device)
    except Exception as error:  # its class depends on what is missing or damaged
        raise SystemExit(
            f"the base {base!r} cannot be loaded on this machine: {error}\n-> set BASE in train.py to a name "
            "on the Hugging Face Hub, or to the absolute path of a folder with config.json and weights, and "
            "target_modules to names of its layers"
        ) from None
    ids_N = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]
    windows = list(ids_N[: len(ids_N) // CONTEXT * CONTEXT].view(-1, CONTEXT))
    dataset, held_out_BT = windows[:-32], torch.stack(windows[-32:]).to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)

    grid = gridtrain.join()  # grid
    exchange = gridtrain.LocalSteps(every=LOCAL_STEPS, exchange=gridtrain.GTopK(density=0.1))  # grid
    optimizer = grid.optimizer(optimizer, model, exchange=exchange)  # grid
    batches = grid.batches(dataset, batch_size=BATCH, steps=EXCHANGES)  # grid: was a DataLoader
    for number, ids_BT in enumerate(batches, start=1):
        ids_BT = ids_BT.to(device)
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

        grid.report(loss=loss.item())  # grid: for `gridtrain status`
        if grid.is_first and number % LOCAL_STEPS == 0 and grid.step % 5 == 0:
            with torch.no_grad(), grid.evaluation():
                held_out = model(input_ids=held_out_BT, labels=held_out_BT).loss.item()
            print(f"exchange {grid.step}: held-out loss {held_out:.3f}", flush=True)


if __name__ == "__main__":
    main()
