"""The byte GPT: its size, its seed, and that it cannot look ahead."""

from __future__ import annotations

import pytest
import torch

from gridtrain.tools.demo.demo_model import ByteGPT, Windows
from gridtrain.tools.demo.recipe import SIZES


@pytest.mark.parametrize("name", SIZES)
def test_a_size_names_its_number_of_parameters(name: str) -> None:
    model = ByteGPT(SIZES[name])

    assert sum(p.numel() for p in model.parameters()) == SIZES[name].parameters


def test_small_is_the_size_whose_rates_were_tuned() -> None:
    assert SIZES["small"].parameters == 120_576


def test_a_seed_determines_every_bit_of_the_model() -> None:
    torch.manual_seed(1)
    one = ByteGPT(SIZES["tiny"], seed=7)
    torch.manual_seed(2)  # the global generator is not used
    same, other = ByteGPT(SIZES["tiny"], seed=7), ByteGPT(SIZES["tiny"], seed=8)

    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.token.weight, other.token.weight)


def test_a_byte_changes_only_later_outputs() -> None:
    model = ByteGPT(SIZES["tiny"])
    text_BT = torch.arange(32).unsqueeze(0)
    changed_BT = text_BT.clone()
    changed_BT[0, 20] = 255

    before, after = model(text_BT)[0], model(changed_BT)[0]

    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20], after[20])


def test_an_untrained_model_has_the_loss_of_uniform_bytes() -> None:
    x_BT, y_BT = Windows(bytes(range(256)) * 8, context=64).evenly_spaced(16)

    assert ByteGPT().loss(x_BT, y_BT).item() == pytest.approx(5.545, abs=0.2)  # ln 256


def test_windows_cover_the_text_and_targets_are_one_byte_ahead() -> None:
    windows = Windows(b"abcdefghij", context=3)

    assert [(bytes(x.tolist()), bytes(y.tolist())) for x, y in (windows[i] for i in range(len(windows)))] == [
        (b"abc", b"bcd"),
        (b"def", b"efg"),
        (b"ghi", b"hij"),
    ]
    with pytest.raises(IndexError, match="the window's index is 3"):
        windows[3]


def test_spread_takes_windows_from_all_over_the_text() -> None:
    x_BT, y_BT = Windows(bytes(range(200)), context=10).evenly_spaced(4)

    assert x_BT[:, 0].tolist() == [0, 40, 90, 140]
    assert y_BT[:, 0].tolist() == [1, 41, 91, 141]
