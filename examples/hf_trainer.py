"""Trains a tiny GPT-2 with Hugging Face's Trainer on several workers.  Nothing is downloaded.

pip install -e '.[adapters]'
gridtrain coordinator                                                       # one terminal
gridtrain worker "$(gridtrain invite)" -- python examples/hf_trainer.py     # one per worker
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import gridtrain
from gridtrain.adapters.hugging_face import GridTrainer
from gridtrain.tools.demo.byte_gpt import Windows
from gridtrain.tools.demo.text_corpus import load_corpus

CONTEXT = 32


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Windows of bytes as tokens; the model itself shifts the labels."""

    def __init__(self, text: bytes) -> None:
        self._windows = Windows(text, CONTEXT)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens_T, _ = self._windows[index]
        return {"input_ids": tokens_T, "labels": tokens_T}


def main(steps: int = 300) -> tuple[torch.nn.Module, list[float]]:
    """Train; return the final model, and the losses that this worker logged."""
    set_seed(1)  # the same model on all workers
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=2, bos_token_id=0,
                   eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = GridTrainer(
            grid=gridtrain.join(),
            grid_options={"exchange": gridtrain.GTopK(density=0.1, momentum=0.9), "clip_norm": 1.0},
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                max_grad_norm=0.0,  # clip_norm clips what was exchanged
                lr_scheduler_type="constant",
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
            ),
            train_dataset=Texts(load_corpus().train),
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.3), None),
        )
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print("losses:", main()[1])
