"""Fine-tunes a language model with LoRA and TRL's SFTTrainer on several workers.

    pip install -e '.[adapters]'
    gridtrain coordinator                                                       # one terminal
    gridtrain worker "$(gridtrain invite)" -- python examples/sft_trainer.py    # one per worker

Replace `small_llama()` with the name of a model on the Hugging Face Hub, or with its folder.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import gridtrain
from gridtrain.adapters.trl import GridSFTTrainer
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.tools.demo.text_corpus import load_corpus

PIECE = 200  # characters


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the losses that this worker logged."""
    base = small_llama()
    text = load_corpus().train[:200_000].decode()
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GridSFTTrainer(
            grid=gridtrain.join(),
            grid_options={"exchange": gridtrain.LocalSteps(every=5, exchange=gridtrain.GTopK(density=0.1))},
            model=AutoModelForCausalLM.from_pretrained(base),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            train_dataset=Dataset.from_dict({"text": pieces}),
            args=SFTConfig(
                output_dir=folder,
                max_steps=steps,  # of the run, for all workers together
                per_device_train_batch_size=4,
                learning_rate=5e-3,
                logging_steps=10,
                save_strategy="no",  # the first worker writes the adapter at the end of the run
                report_to="none",
                bf16=torch.cuda.is_available(),
                use_cpu=not torch.cuda.is_available(),
            ),
        )
        trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("losses:", main()[1])
