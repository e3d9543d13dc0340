"""`trl.SFTTrainer` as a worker of a run.

    trainer = GridSFTTrainer(grid=grid, grid_options={"exchange": exchange}, model=model, peft_config=lora,
                             args=SFTConfig(max_steps=500, ...), train_dataset=dataset)

See `gridtrain.adapters.hugging_face`, which describes the mixin.
"""

from __future__ import annotations

from gridtrain.extras import require

require("trl", "gridtrain.adapters.trl")

from trl import SFTTrainer  # noqa: E402

from gridtrain.adapters.hugging_face import GridTrainerMixin  # noqa: E402


class GridSFTTrainer(GridTrainerMixin, SFTTrainer):
    """A `trl.SFTTrainer` that trains as a worker of a run.  The arguments are those of `GridTrainerMixin`."""
