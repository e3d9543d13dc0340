"""Small random models of real architectures, saved, loaded by `from_pretrained`, and trained by two workers.

save_base("llama", folder)    config.json, model.safetensors, tokenizer files, without a network
train(models)                 one worker for each model, in this process; equal digests at the end
"""

from __future__ import annotations

import functools
import hashlib
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from threaded_group import ThreadedGroup

import gridtrain
from gridtrain.cli.main import cli
from gridtrain.errors import ConfigError
from gridtrain.tools.demo.small_llama import small_llama
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.checkpoint.pretrained import adapter_facts

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-adapters")

VOCABULARY, CONTEXT, STEPS = 256, 24, 8
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, **HEADS, pad_token_id=0),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def save_base(architecture: str, folder: Path) -> Path:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture]()).save_pretrained(folder)
    return folder


def load(base: Path | str, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(base, **options)


def with_lora(model, autocast_adapter_dtype: bool = True, **options):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)


def samples() -> list[torch.Tensor]:
    """Text that repeats itself, so that even a small adapter learns something."""
    text_T = torch.arange(4 * CONTEXT * STEPS) % 7 + 97
    return list(text_T.view(-1, CONTEXT))


def digest(model) -> str:
    """Of all parameters' bits, whatever their dtype."""
    raw = [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(raw)).hexdigest()


def train(models, tmp_path: Path, *, learning_rate: float = 0.05) -> None:
    """Train each model on a worker of its own."""

    def work(grid, number: int) -> None:
        model = models[number]
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
        exchange = gridtrain.LocalSteps(every=2, exchange=gridtrain.GTopK(density=0.5))
        optimizer = grid.optimizer(inner, model, exchange=exchange)
        for ids_BT in grid.batches(samples(), batch_size=2, steps=STEPS):
            model(input_ids=ids_BT, labels=ids_BT).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with ThreadedGroup(tmp_path, workers=len(models)) as group:
        for number in range(len(models)):
            group.start(work, checkpoint_every=2, state_dir=str(tmp_path / f"worker-{number}"))
        group.finish()


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=samples()[0][None]).logits.float()


def loss_of(model) -> float:
    model.eval()
    ids_BT = torch.stack(samples())
    with torch.no_grad():
        return model(input_ids=ids_BT, labels=ids_BT).loss.item()


def at_checkpoint(model, tmp_path: Path):
    """Load the plain file of worker 0's latest checkpoint, which has the names of the model in memory."""
    export(tmp_path / "worker-0", tmp_path / "plain.safetensors")
    state = model.state_dict(keep_vars=True)
    named = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    with torch.no_grad():
        for name, tensor in safetensors.torch.load_file(tmp_path / "plain.safetensors").items():
            named[name].copy_(tensor)
    return model


def export(*arguments: object) -> None:
    done = CliRunner().invoke(cli, ["export", *map(str, arguments)])
    assert done.exit_code == 0, done.exception


@pytest.mark.parametrize("architecture", CONFIGS)
def test_adapters_of_two_workers_are_equal_and_load_in_plain_peft(architecture, tmp_path) -> None:
    base = save_base(architecture, tmp_path / "base")
    models = [with_lora(load(base)) for _ in range(2)]
    train(models, tmp_path)
    assert digest(models[0]) == digest(models[1])
    adapter = tmp_path / "final-adapter"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in adapter.iterdir()}
    assert not list(tmp_path.glob("final*.safetensors")), "the base is in no exported file"
    plain = peft.PeftModel.from_pretrained(load(base), adapter)
    assert torch.equal(logits(plain), logits(models[0]))
    assert loss_of(plain) < loss_of(load(base)) - 0.1

    export(tmp_path / "worker-0", tmp_path / "exported")
    exported = peft.PeftModel.from_pretrained(load(base), tmp_path / "exported")
    assert torch.equal(logits(exported), logits(plain)), "the checkpoint is of the last step"
    assert torch.equal(logits(exported), logits(at_checkpoint(models[1], tmp_path)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # an output layer of its own, and a tied one
def test_a_whole_model_is_exported_in_shards(architecture, tmp_path) -> None:
    base = save_base(architecture, tmp_path / "base")
    models = [load(base) for _ in range(2)]
    train(models, tmp_path, learning_rate=0.01)
    assert digest(models[0]) == digest(models[1])
    export(tmp_path / "worker-1", tmp_path / "whole", "--shard-size", "20kB")
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors*"))
    assert len(names) > 2 and names[-1] == "model.safetensors.index.json"
    assert torch.equal(logits(load(tmp_path / "final-model")), logits(models[0]))
    assert torch.equal(logits(load(tmp_path / "whole")), logits(at_checkpoint(models[0], tmp_path)))


def rows_added(model):
    """New rows of the embedding, and of the output layer, which are trained with the adapters."""
    torch.manual_seed(2)  # the new rows are random, and must be the same on all workers
    model.resize_token_embeddings(VOCABULARY + 8)
    return with_lora(model, modules_to_save=["embed_tokens", "lm_head"])


def checkpointed(model):
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return with_lora(model)


def compiled(model):
    lora = with_lora(model)
    lora.compile(backend="eager")
    return lora


BF16 = torch.bfloat16
VARIANTS = {
    "bfloat16": ("llama", lambda base: with_lora(load(base, dtype=BF16), autocast_adapter_dtype=False)),
    "float32 adapters of a bfloat16 base": ("llama", lambda base: with_lora(load(base, dtype=BF16))),
    "gradient checkpointing": ("llama", lambda base: checkpointed(load(base))),
    "DoRA": ("llama", lambda base: with_lora(load(base), use_dora=True)),
    "resized": ("llama", lambda base: rows_added(load(base))),
    "resized and tied": ("qwen2", lambda base: rows_added(load(base))),
    "torch.compile": ("llama", lambda base: torch.compile(with_lora(load(base)), backend="eager")),
    "module.compile()": ("llama", lambda base: compiled(load(base))),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_adapters(variant, tmp_path) -> None:
    architecture, make = VARIANTS[variant]
    base = save_base(architecture, tmp_path / "base")
    models = [make(base) for _ in range(2)]
    train(models, tmp_path)
    assert digest(models[0]) == digest(models[1])
    fresh = load(base, dtype=next(p.dtype for p in models[0].parameters() if not p.requires_grad))
    if "resized" in variant:
        fresh.resize_token_embeddings(VOCABULARY + 8)
    exact = {"autocast_adapter_dtype": False} if variant == "bfloat16" else {}
    plain = peft.PeftModel.from_pretrained(fresh, tmp_path / "final-adapter", **exact)
    assert torch.equal(logits(plain), logits(models[0]))
    export(tmp_path / "worker-0", tmp_path / "exported")
    exported = peft.PeftModel.from_pretrained(plain.unload(), tmp_path / "exported", **exact)
    assert torch.equal(logits(exported), logits(at_checkpoint(models[0], tmp_path)))


class WithHead(torch.nn.Module):
    """A layer beside a frozen language model."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.language_model, self.head = load(base).requires_grad_(False), torch.nn.Linear(VOCABULARY, 2)

    def forward(self, input_ids, labels):
        logits_BTV = self.language_model(input_ids=input_ids).logits
        loss = torch.nn.functional.cross_entropy(self.head(logits_BTV[:, -1]), labels[:, -1] % 2)
        return types.SimpleNamespace(loss=loss)


def test_a_trained_layer_beside_the_language_model_is_not_lost(tmp_path) -> None:
    base = save_base("llama", tmp_path / "base")
    models = [WithHead(base) for _ in range(2)]
    train(models, tmp_path)
    assert not (tmp_path / "final-model").exists() and not (tmp_path / "final-adapter").exists()
    exported = safetensors.torch.load_file(tmp_path / "final.safetensors")
    assert torch.equal(exported["head.weight"], models[0].head.weight)
    done = CliRunner().invoke(cli, ["export", str(tmp_path / "worker-0"), str(tmp_path / "folder")])
    assert (
        isinstance(done.exception, ConfigError) and "has no configuration of a PEFT" in done.exception.reason
    )


def in_four_bits():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def in_eight_bits():
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def test_the_small_llama_has_the_same_bits_on_all_processors(tmp_path) -> None:
    """The digest as recorded: draws of `torch.randn` depend on the vector instructions."""
    model = load(small_llama(tmp_path / "base")).requires_grad_(False)
    assert FrozenBase(model).describe() == "1.45 MB in 21 frozen tensors, digest ac06b9719eff"
    assert 0.09 < model.lm_head.weight.std() < 0.11 and abs(model.lm_head.weight.mean()) < 0.01


@pytest.mark.parametrize("quantisation", [in_four_bits, in_eight_bits])
def test_adapters_of_a_quantised_base(quantisation, tmp_path) -> None:
    base = small_llama(tmp_path / "base")  # bitsandbytes needs rows of at least 64
    config = quantisation()
    load_quantised = functools.partial(load, base, quantization_config=config, device_map="cpu")
    # bitsandbytes packs the weights of a model in eval mode anew for a CPU, which would be another base.
    models = [with_lora(load_quantised()).train() for _ in range(2)]
    train(models, tmp_path)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs if first.requires_grad)
    plain = peft.PeftModel.from_pretrained(load_quantised(), tmp_path / "final-adapter")
    assert torch.equal(logits(plain), logits(models[0]))
    export(tmp_path / "worker-0", tmp_path / "exported")
    peft.PeftModel.from_pretrained(load_quantised(), tmp_path / "exported")


def test_adapters_with_other_settings_are_another_run(tmp_path: Path) -> None:
    """`lora_alpha` changes no parameter's name or shape, but what the exported adapter computes."""
    facts = [
        adapter_facts(peft.get_peft_model(load(base), peft.LoraConfig(r=2, lora_alpha=alpha)))
        for base, alpha in (
            (save_base("llama", tmp_path / "here"), 4),
            (save_base("llama", tmp_path / "there"), 4),
            (tmp_path / "here", 8),
        )
    ]
    assert facts[0] == facts[1] != facts[2]
    assert "r=2 lora_alpha=4 digest" in facts[0][0][1]
    assert adapter_facts(load(tmp_path / "here")) == ()
