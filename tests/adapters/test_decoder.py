"""Language models as chains of blocks: the same bits as transformers' own forward and backward, and a
pipeline of four stages that reaches the parameters of plain torch."""

from __future__ import annotations

import checkpointed_group
import pytest
import safetensors.torch
import torch

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.sdk.local_group import local
from gridtrain.training.checkpoint.model_export import export_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-adapters")

from gridtrain.adapters.decoder import decoder_blocks, decoder_blueprint, next_token_loss  # noqa: E402

VOCABULARY, CONTEXT, BATCH, STEPS = 64, 12, 8, 4
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE, **HEADS),
    "llama, tied, scaled": lambda: transformers.LlamaConfig(
        **SIZE, **HEADS, tie_word_embeddings=True, rope_parameters=SCALED
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZE, **HEADS, sliding_window=4),
    "qwen2": lambda: transformers.Qwen2Config(**SIZE, **HEADS),
    "qwen2, two kinds of layers": lambda: transformers.Qwen2Config(**SIZE, **HEADS, **SLIDING),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, **HEADS),
    "gemma": lambda: transformers.GemmaConfig(**SIZE, **HEADS),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),  # tied, with dropout
}


def make(name: str):
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def drawn(samples: int = BATCH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (samples, CONTEXT), generator=torch.Generator().manual_seed(2))


def padded() -> dict[str, torch.Tensor]:
    """Samples of different lengths, padded on the left."""
    mask = (torch.arange(CONTEXT) >= torch.arange(BATCH)[:, None]).long()
    return {"input_ids": drawn(), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def packed() -> dict[str, torch.Tensor]:
    """Two texts in one sample: positions begin again, and the second must not attend to the first."""
    return {"input_ids": drawn(), "position_ids": (torch.arange(CONTEXT) % 7).expand(BATCH, -1)}


@pytest.mark.parametrize("inputs", [drawn, padded, packed])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_of_blocks_has_the_bits_of_the_model(name, inputs) -> None:
    given = inputs()
    found = []
    for is_chain in (True, False):
        model = make(name).train()
        torch.manual_seed(3)  # of dropout
        if is_chain:
            logits = decoder_blocks(model)(given)
        else:
            logits = model(**({"input_ids": given} if inputs is drawn else given), use_cache=False).logits
        logits.square().mean().backward()
        found.append((logits, [p.grad for p in model.parameters()]))
    (logits, gradients), (expected, of_model) = found
    assert torch.equal(logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, of_model, strict=True))
    assert len(gradients) > 4 * 6


@pytest.mark.parametrize("name", ["llama", "llama, tied, scaled", "gpt2"])
def test_blocks_are_drawn_like_the_model_and_read_from_its_files(name, tmp_path) -> None:
    model = make(name)
    drawn_state = built(decoder_blueprint(CONFIGS[name](), seed=4)).state_dict()
    assert drawn_state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        spread = drawn_state[key].std().item()
        assert spread == pytest.approx(value.std().item(), rel=0.15, abs=1e-6), f"{key}: {spread}"
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(built(decoder_blueprint(tmp_path)).state_dict(), model.state_dict())
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises((ConfigError, OSError)):
        built(decoder_blueprint(tmp_path))


def built(blueprint) -> torch.nn.Module:
    """The whole model in memory."""
    from gridtrain.pipeline.model_stages import StageModule

    return StageModule(blueprint.build(0, len(blueprint)), blueprint.names)


def same(state, other) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in other)


@pytest.mark.parametrize(
    ("name", "make_optimizer", "tolerance"),
    [  # a tied gradient is a sum in another order, and Adam divides small differences by small gradients
        ("llama", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), 0.0),
        ("gpt2", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1e-6),
    ],
)
def test_four_stages_train_like_plain_torch(name, make_optimizer, tolerance, tmp_path) -> None:
    config = CONFIGS[name]()
    config.update({key: 0.0 for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop") if hasattr(config, key)})
    dataset = [(ids, ids) for ids in drawn(BATCH * STEPS)]

    def train(grid: gridtrain.Grid):
        pipe = grid.pipeline(
            decoder_blueprint(config, seed=4),
            make_optimizer,
            stages=4,
            loss_fn=next_token_loss,
            micro_batches=2,
            exchange=gridtrain.Dense(),
        )
        batches, losses = [], []
        for inputs, targets in grid.batches(dataset, batch_size=BATCH, steps=STEPS):
            batches.append(inputs)
            losses.append(pipe.step(inputs, targets))
        state = {key: value.clone() for key, value in pipe.module.state_dict().items()}
        return batches, losses, state

    found = local(train, workers=4, export_dir=str(tmp_path))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(built(decoder_blueprint(config, seed=4)).state_dict())
    optimizer, losses = make_optimizer(model.parameters()), []
    for ids_BT in found[0][0]:
        optimizer.zero_grad()
        pieces = [
            next_token_loss(model(piece, use_cache=False).logits, piece) / 2 for piece in ids_BT.chunk(2)
        ]
        for piece in pieces:
            piece.backward()
        optimizer.step()
        losses.append(sum(piece.item() for piece in pieces))
    state = {key: value for _, _, held in found for key, value in held.items()}
    assert len({tuple(held) for _, _, held in found}) == 4 and losses[-1] < losses[0]
    for _, own, _ in found:
        assert own == pytest.approx(losses, abs=1e-5)
    for key, value in model.state_dict().items():
        assert (state[key] - value).abs().max().item() <= tolerance, key


@pytest.mark.parametrize("name", ["llama, tied, scaled", "gpt2"])
def test_adapters_on_four_stages_train_like_peft_and_are_exported_for_it(name, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-adapters")
    base, out = tmp_path / "base", tmp_path / "adapter"
    make(name).eval().save_pretrained(base, max_shard_size="20kB")
    dataset = [(ids, ids) for ids in drawn(BATCH * STEPS)]
    layers = "all-linear" if name != "gpt2" else ["c_attn", "c_fc", "c_proj"]

    def lora():
        return peft.LoraConfig(r=2, lora_alpha=6, target_modules=layers, task_type="CAUSAL_LM")

    def blueprint():
        made = decoder_blueprint(base, seed=4, lora=lora())
        for module in (module for block in made.blocks for module in block.modules()):
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return made

    def train(grid: gridtrain.Grid):
        pipe = grid.pipeline(
            blueprint(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            stages=4,
            loss_fn=next_token_loss,
            micro_batches=1,
        )
        batches = []
        for inputs, targets in grid.batches(dataset, batch_size=BATCH, steps=STEPS):
            batches.append(inputs)
            pipe.step(inputs, targets)
        assert {n for n, p in pipe.module.named_parameters() if p.requires_grad} == {
            n for n, _ in pipe.module.named_parameters() if ".lora_" in n
        }
        return batches, pipe.module.state_dict()

    found = checkpointed_group.run(tmp_path / "state", 4, train, every=STEPS)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = peft.get_peft_model(model, lora())
    initial = built(blueprint()).state_dict()
    assert model.load_state_dict(initial, strict=False).unexpected_keys == []
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for ids_BT in found[0][0]:
        optimizer.zero_grad()
        next_token_loss(model.eval()(ids_BT, use_cache=False).logits, ids_BT).backward()
        optimizer.step()
    changed = 0
    for _, state in found:
        for key, value in state.items():
            assert (model.state_dict()[key] - value).abs().max().item() <= 1e-6, key
            changed += not torch.equal(value, initial[key])
    assert changed == len(trained)
    export_model(tmp_path / "state", out)
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out)
    logits = again.eval()(drawn(), use_cache=False).logits
    assert torch.allclose(logits, plain.eval()(drawn(), use_cache=False).logits, atol=1e-5)
    with torch.no_grad(), again.disable_adapter():
        assert not torch.allclose(logits, again(drawn(), use_cache=False).logits, atol=1e-3)


def test_workers_with_other_adapters_are_refused_and_only_plain_ones_are_accepted() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-adapters")
    config = CONFIGS["llama"]()
    facts = [
        decoder_blueprint(
            config, lora=peft.LoraConfig(r=2, lora_alpha=alpha, target_modules="all-linear")
        ).facts
        for alpha in (2, 2, 4)
    ]
    assert facts[0] == facts[1] != facts[2]
    for wrong in (
        peft.LoraConfig(use_dora=True, target_modules="all-linear"),
        peft.LoraConfig(modules_to_save=["lm_head"], target_modules="all-linear"),
        peft.LoraConfig(init_lora_weights="pissa", target_modules="all-linear"),
        peft.LoraConfig(trainable_token_indices=[1], target_modules="all-linear"),
        peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"),
    ):
        with pytest.raises(ConfigError, match="which a model in stages cannot use -> set only"):
            decoder_blueprint(config, lora=wrong)
    with pytest.raises(ConfigError, match=r"lora is an IA3Config -> pass a peft\.LoraConfig"):
        decoder_blueprint(config, lora=peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))


def test_adapters_do_not_depend_on_what_the_files_of_the_base_contain(tmp_path) -> None:
    """Replicas draw them on their own: a file may also hold a tied tensor under its second name."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-adapters")
    model = make("llama, tied, scaled")
    states = []
    for tied in (False, True):
        folder = tmp_path / str(tied)
        model.save_pretrained(folder)
        if tied:
            path = folder / "model.safetensors"
            tensors = safetensors.torch.load_file(path)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            safetensors.torch.save_file(tensors, path, {"format": "pt"})
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "lm_head"])
        blueprint = decoder_blueprint(folder, lora=lora)
        assert str(tmp_path) not in str(blueprint.pretrained), "checkpoints are sent to other workers"
        states.append(built(blueprint).state_dict())
    assert same(*states) and any("lm_head.lora_A" in name for name in states[0])
    drawn = [value for name, value in states[0].items() if "lora_A" in name]
    assert not torch.equal(drawn[0], drawn[1]), "each has a seed of its own"


def test_a_whole_model_in_stages_is_exported_for_from_pretrained(tmp_path) -> None:
    dataset = [(ids, ids) for ids in drawn(BATCH * STEPS)]

    def train(grid: gridtrain.Grid):
        model, sgd = decoder_blueprint(CONFIGS["gpt2"](), seed=4), torch.optim.SGD
        pipe = grid.pipeline(
            model, lambda parameters: sgd(parameters, lr=0.1), stages=2, loss_fn=next_token_loss
        )
        for inputs, targets in grid.batches(dataset, batch_size=BATCH, steps=STEPS):
            pipe.step(inputs, targets)
        return pipe.module.state_dict()

    found = checkpointed_group.run(tmp_path / "state", 2, train, every=STEPS)
    export_model(tmp_path / "state", tmp_path / "out")
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    held = {key: value for stage in found for key, value in stage.items()}
    assert same(held, {key: value for key, value in state.items() if key in held})
    assert set(state) - set(held) == set()


def test_other_models_and_inputs_are_refused(tmp_path) -> None:
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
        )
    )
    for model in (encoder, make("llama").model, torch.nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="not known to be a chain of decoder layers"):
            decoder_blocks(model)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        decoder_blueprint(tmp_path)
    with pytest.raises(ConfigError, match="labels are the targets"):
        decoder_blocks(make("llama"))({"input_ids": drawn(), "labels": drawn()})


@pytest.mark.integration
def test_the_example_trains_with_four_workers(trained) -> None:
    ends = trained("pipeline_llama.py", workers=4, steps=20)
    assert len({end["digest"] for end in ends}) == 4, "each worker has a stage of its own"
    assert len({tuple(end["losses"]) for end in ends}) == 1
    assert ends[0]["losses"][-1] < ends[0]["losses"][0] - 1.0
