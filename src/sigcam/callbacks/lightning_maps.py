"""LightningMaps: draw maps at the validations of a Lightning Trainer."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sigcam.callbacks.training_maps import TrainingMaps
from sigcam.core.errors import MissingExtra

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingExtra("sigcam.callbacks.LightningMaps", "lightning", "lightning") from error


class LightningMaps(TrainingMaps, Callback):  # type: ignore[misc]  # Callback is Any to mypy
    """Draw maps at validations of a Lightning Trainer; for the arguments see `TrainingMaps`."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse training data that cannot be fitted on, before the training rather than after it."""
        if self.config is not None and trainer.is_global_zero:
            self.training_data(trainer.train_dataloader)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first images."""
        if trainer.is_global_zero:
            self.keep_images(batch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Draw the maps; in Lightning's sanity check, only try to."""
        if not trainer.is_global_zero:
            return
        if trainer.sanity_checking:
            self.draw(pl_module, 0)
        elif self.is_due():
            step = trainer.global_step
            self._publish(trainer, self.draw(pl_module, step), self.branch, step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the branch, if that was asked for."""
        if self.config is not None and trainer.is_global_zero:
            step, folder = trainer.global_step, self._folder(trainer)
            picture = self.fit_branch(pl_module, trainer.train_dataloader, step, folder)
            self._publish(trainer, picture, "sigmoid", step)

    def _publish(self, trainer: Any, picture: Image.Image, branch: Any, step: int) -> None:
        def log(picture: Image.Image, name: str, step: int) -> bool:
            return any([_logged(logger, picture, name, step) for logger in trainer.loggers])

        self.publish(picture, branch, step, self._folder(trainer), log)

    def _folder(self, trainer: Any) -> Path:
        """The given folder, else `maps` in that of the run."""
        # trainer.log_dir would wait for the other processes
        run = getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir
        return self.folder or Path(run) / "maps"


def _logged(logger: Any, picture: Image.Image, name: str, step: int) -> bool:
    """Give the picture to a logger; return whether it takes images: W&B's and TensorBoard's do."""
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[picture], step=step)
    elif hasattr(logger.experiment, "add_image"):
        logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
    else:
        return False
    return True
