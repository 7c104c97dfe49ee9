"""What both sides of ``bench_trl.py`` start from: a warmed-up model, prompts, and the sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from safetensors.torch import save_file

from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.data import open_data, warmup_batch
from dataproto_audit.trainer.models import ModelFolder, prepare_model


def warm_up(config: DictConfig, model: ModelFolder) -> float:
    """Do the quickstart's supervised steps in this process and write the weights back.

    Both sides start from the same answers then, of about two tokens; a model from random weights
    would sample to the limit. Returns the loss of the last step.
    """
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.warmup.lr, weight_decay=0.0)
    steps, size = int(config.warmup.steps), int(config.warmup.batch_size)
    batch = warmup_batch(config.data, model.tokenizer, steps=steps, batch_size=size).batch
    width = batch["prompts"].shape[1]
    last = float("nan")
    for step in range(steps):
        rows = batch[step * size : (step + 1) * size]
        logits = network(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            position_ids=rows["position_ids"],
        ).logits[:, width - 1 : -1]
        nll = F.cross_entropy(logits.flatten(0, 1), rows["responses"].flatten(), reduction="none")
        mask = rows["response_mask"].flatten()
        loss = (nll * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(state, model.path / "model.safetensors", metadata={"format": "pt"})
    return last


def write_prompts(config: DictConfig, model: ModelFolder, path: Path, *, steps: int) -> None:
    """The prompts of the first ``steps`` training batches, in the order of the audited loop."""
    prompts = open_data(config.data, model.tokenizer)
    with path.open("w", encoding="utf-8") as lines:
        for step in range(1, steps + 1):
            columns = prompts.batch(step).non_tensor_batch
            for text, ids, scored in zip(
                columns["raw_prompt"], columns["prompt_ids"], columns["reward_model"], strict=True
            ):
                row = {"prompt": text, "prompt_ids": ids, "ground_truth": scored["ground_truth"]}
                lines.write(json.dumps(row) + "\n")


def task(config: DictConfig) -> dict[str, Any]:
    """The quickstart's numbers that TRL needs, read from its configuration."""
    roles = config.actor_rollout_ref
    actor = roles.actor
    return {
        "prompts": config.data.train_batch_size,
        "samples": roles.rollout.n,
        "mini_batches": config.data.train_batch_size // actor.ppo_mini_batch_size,
        "max_tokens": config.data.max_response_length,
        "temperature": roles.rollout.temperature,
        "beta": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "clip": actor.clip_ratio,
        "lr": actor.optim.lr,
        "lr_warmup_steps": actor.optim.lr_warmup_steps,
        "weight_decay": actor.optim.weight_decay,
        "grad_clip": actor.grad_clip,
        "seed": config.trainer.seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--task", type=Path, required=True, help="JSON document to write")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load_config("quickstart")
    args.task.write_text(json.dumps(task(config)), encoding="utf-8")
    model = prepare_model(config.actor_rollout_ref.model, folder=args.model)
    write_prompts(config, model, args.data, steps=args.steps)
    print(f"{config.warmup.steps} supervised steps: loss {warm_up(config, model):.3f}")


if __name__ == "__main__":
    main()
