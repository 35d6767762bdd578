"""TrainerMaps: draw maps at the evaluations of a Hugging Face Trainer."""

import sys
from pathlib import Path
from typing import Any

from PIL import Image

from sigcam.callbacks.training_maps import TrainingMaps
from sigcam.core.errors import MissingExtra

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtra("sigcam.callbacks.TrainerMaps", "transformers", "hf") from error


class TrainerMaps(TrainingMaps, TrainerCallback):  # type: ignore[misc]  # TrainerCallback is Any to mypy
    """Draw maps at evaluations of a Hugging Face Trainer; for the arguments see `TrainingMaps`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Refuse a model or training data that will not do, before the training rather than after it."""
        if state.is_world_process_zero:
            if self.images is not None:
                self.draw(model, 0)
            if self.config is not None:
                self.training_data(others.get("train_dataloader"))

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Draw the maps."""
        if state.is_world_process_zero and self.is_due():
            self.keep_first(others.get("eval_dataloader"))
            step = state.global_step
            self.publish(self.draw(model, step), self.branch, step, self._folder(args), _logged)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Fit the branch, if that was asked for."""
        if self.config is not None and state.is_world_process_zero:
            step, folder, loader = state.global_step, self._folder(args), others.get("train_dataloader")
            self.publish(self.fit_branch(model, loader, step, folder), "sigmoid", step, folder, _logged)

    def _folder(self, args: Any) -> Path:
        return self.folder or Path(args.output_dir) / "maps"


def _logged(picture: Image.Image, name: str, step: int) -> bool:
    """Give the picture to the W&B run, if there is one."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return False
    wandb.log({name: wandb.Image(picture), "train/global_step": step})
    return True
