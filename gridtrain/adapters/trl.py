"""Runs `trl.SFTTrainer` as a worker of a run, with the mixin from `hugging_face`.

    trainer = GridSFTTrainer(grid=grid, grid_options={"exchange": exchange}, model=model, peft_config=lora,
                             args=SFTConfig(max_steps=500, ...), train_dataset=dataset)

See `gridtrain.adapters.hugging_face`, which describes the mixin.
"""

from __future__ import annotations

from typing import Any

from gridtrain.extras import require

require("trl", "gridtrain.adapters.trl")

from datasets import Dataset  # noqa: E402  trl needs it
from trl import SFTTrainer  # noqa: E402

from gridtrain.adapters.hugging_face import GridTrainerMixin  # noqa: E402
from gridtrain.errors import ConfigError  # noqa: E402
from gridtrain.training.data.shards import ShardedDataset  # noqa: E402


class GridSFTTrainer(GridTrainerMixin, SFTTrainer):
    """A `trl.SFTTrainer` that trains as a worker of a run.  The arguments are those of `GridTrainerMixin`.

    The samples of a `ShardedDataset` must be tokenized: {"input_ids": ..., "labels": ...}.

    Raises:
        ConfigError: an argument cannot be used in a run, or SFTTrainer cannot prepare the data set.
    """

    def __init__(self, *, train_dataset: Any = None, **options: Any) -> None:
        if not isinstance(train_dataset, ShardedDataset):
            try:
                super().__init__(train_dataset=train_dataset, **options)
            except KeyError as error:
                columns = getattr(train_dataset, "column_names", None)
                if columns is None or error.args[0] in columns:
                    raise
                raise ConfigError(
                    f"train_dataset has no column {error}; its columns: {', '.join(columns) or 'none'}",
                    remedy="rename one: SFTTrainer reads text, messages, prompt and completion, or input_ids",
                ) from error
            except ValueError as error:
                if "chat_template" not in str(error):
                    raise
                raise ConfigError(
                    "train_dataset has conversations, but the base's tokenizer has no chat template",
                    remedy="use a base that was tuned for chat, set tokenizer.chat_template and pass "
                    "processing_class=tokenizer, or use a data set with a `text` column",
                ) from error
            return
        # SFTTrainer accepts and prepares only data sets of the `datasets` package; it gets one tokenized row.
        super().__init__(train_dataset=Dataset.from_list([{"input_ids": [0], "labels": [0]}]), **options)
        self.train_dataset = train_dataset
