"""Continues a text with the adapter of this run, without gridtrain: python generate.py FOLDER "a text"

FOLDER is the folder whose path the first worker printed at the end, or one that `gridtrain export` wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: str = ".", text: str = "import ") -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    if missing := [name for name in names if not Path(folder, name).is_file()]:
        sys.exit(
            f'generate.py: the folder "{folder}" has no {" and no ".join(missing)}; give the folder that the '
            "first worker printed at the end, or that `gridtrain export` wrote"
        )
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(folder)  # also loads the base that it names
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    continued = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=80, do_sample=False)
    print(tokenizer.decode(continued[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:3])
