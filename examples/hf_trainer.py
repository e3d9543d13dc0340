"""Fine-tunes a language model with LoRA and Hugging Face's Trainer on several workers.

    pip install -e '.[adapters]'
    gridtrain coordinator                                                       # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/hf_trainer.py     # one per worker

Replace `small_llama()` with the name of a model on the Hugging Face Hub, or with its folder.
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import gridtrain
from gridtrain.adapters.hugging_face import GridTrainer
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.tools.demo.text_corpus import load_corpus

CONTEXT = 64


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the losses that this worker logged."""
    base = small_llama()
    tokenizer = AutoTokenizer.from_pretrained(base)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    ids = tokenizer(load_corpus().train[:200_000].decode())["input_ids"]
    windows = [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT, CONTEXT)]
    exchange = gridtrain.LocalSteps(every=5, exchange=gridtrain.GTopK(density=0.1))  # Trainer uses AdamW
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,  # of the optimizer on each worker; 5 of them are a step of the run
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            logging_steps=10,
            save_strategy="no",  # the first worker writes the adapter at the end of the run
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        dataset = [{"input_ids": window, "labels": window} for window in windows]
        grid = gridtrain.join()
        options = {"exchange": exchange}
        trainer = GridTrainer(
            grid=grid, grid_options=options, model=model, args=arguments, train_dataset=dataset
        )
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("losses:", main()[1])
