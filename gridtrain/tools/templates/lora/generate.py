"""Continues a text with the adapter of this run, without gridtrain: python generate.py FOLDER "a text"

FOLDER is the one that the first worker printed at the end, or that `gridtrain export` wrote.
"""

from __future__ import annotations

import sys

from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer


def main(folder: str, text: str) -> None:
    model = AutoPeftModelForCausalLM.from_pretrained(folder)  # and the base that it names
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    continued = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=80, do_sample=False)
    print(tokenizer.decode(continued[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "import ")
