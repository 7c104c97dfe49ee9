"""Run inside verl's environment: the metrics of ten steps by TensorBoard's and W&B's own writers.

python write_logs.py FOLDER      FOLDER/tensorboard/events..., FOLDER/wandb/offline-run-...
"""

import os
import sys
from pathlib import Path

STEPS = [
    {"actor/grad_norm": 0.5 + step, "actor/pg_loss": -0.01 * step, "training/global_step": step}
    for step in range(1, 11)
]


def main():
    folder = Path(sys.argv[1])
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "tensorboard") as writer:
        for step in STEPS:
            for name, value in step.items():
                writer.add_scalar(name, value, step["training/global_step"])
        writer.add_text("notes", "text is passed over", 1)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb

    run = wandb.init(project="x", dir=str(folder), settings=wandb.Settings(disable_git=True))
    for step in STEPS:
        run.log(dict(step), step=step["training/global_step"])
    run.finish()


if __name__ == "__main__":
    main()
