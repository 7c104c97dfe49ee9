"""TRL's side of ``bench_trl.py``: a GRPO run in one process that measures its own CPU seconds.

Runs in an environment of its own, so it imports nothing of this repository. Input and output are
files: a model folder, prompts as JSON lines, and a JSON document with what was measured.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):  # type: ignore[misc]  # a class of an untyped library
    """Notes CPU and wall seconds whenever all mini-batches of a batch of completions are done."""

    def __init__(self, mini_batches: int) -> None:
        self.mini_batches = mini_batches
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if state.global_step % self.mini_batches == 0:
            self.cpu_s.append(time.process_time())
            self.wall_s.append(time.perf_counter())


class Phases:
    """CPU seconds inside some of the trainer's methods, one sum for each step."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.cpu_s: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def wrap(self, owner: Any, method: str, name: Callable[..., str]) -> None:
        """Measure ``owner.method`` under ``name(*arguments)``; skipped where there is none."""
        inner = getattr(owner, method, None)
        if inner is None:
            return

        @functools.wraps(inner)
        def measured(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                step = len(self.clock.cpu_s)
                self.cpu_s[name(*args, **kwargs)][step] += time.process_time() - before

        setattr(owner, method, measured)


class Scores:
    """The reward of the quickstart: the exact answer, ended by the end token; keeps its means."""

    __name__ = "exact_with_eos"

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id
        self.means: list[float] = []
        self.lengths: list[float] = []

    def __call__(
        self,
        completions: list[str],
        completion_ids: list[list[int]],
        ground_truth: list[str],
        **_: Any,
    ) -> list[float]:
        """One score for each completion; completion ids hold the end token where there is one."""
        scores = [
            float(ids[-1] == self.eos_id and text == truth)
            for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
        ]
        self.means.append(sum(scores) / len(scores))
        self.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return scores


def settings(task: dict[str, Any], args: argparse.Namespace, folder: str) -> GRPOConfig:
    """The quickstart's sizes in TRL's words.

    One batch of completions makes several optimizer steps, so TRL computes old log-probs as the
    audited loop does; ``bnpo`` divides by the tokens of the mini-batch (``token-mean``).
    """
    options: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": args.attention},
        "per_device_train_batch_size": task["prompts"] * task["samples"] // task["mini_batches"],
        "gradient_accumulation_steps": 1,
        "steps_per_generation": task["mini_batches"],
        "num_iterations": 1,
        "num_generations": task["samples"],
        "max_completion_length": task["max_tokens"],
        "max_steps": args.steps * task["mini_batches"],
        "temperature": task["temperature"],
        "beta": task["beta"],
        "use_bias_correction_kl": False,
        "loss_type": "bnpo",
        "epsilon": task["clip"],
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": task["lr_warmup_steps"] * task["mini_batches"],
        "weight_decay": task["weight_decay"],
        "max_grad_norm": task["grad_clip"],
        "shuffle_dataset": False,
        "seed": task["seed"],
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**options)


def load_prompts(path: Path, tokenizer: Any) -> Dataset:
    """The prompts in order; raises ValueError if the tokenizer makes other ids of them."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ids = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    if ids != [row["prompt_ids"] for row in rows]:
        raise ValueError(f"{path}: this environment's tokenizer makes other ids of the prompts")
    return Dataset.from_list(
        [{key: row[key] for key in ("prompt", "ground_truth")} for row in rows]
    )


def scored_as(model: Any, reference: Any) -> str:
    """Which of its three uses a log-prob pass is."""
    if torch.is_grad_enabled():
        return "update forward"
    return "ref_log_prob" if model is reference else "old_log_prob"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--attention", default="sdpa")
    args = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    task = json.loads(args.task.read_text(encoding="utf-8"))
    scores, clock = Scores(tokenizer.eos_token_id), StepClock(task["mini_batches"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(args.model),
            reward_funcs=scores,
            args=settings(task, args, folder),
            train_dataset=load_prompts(args.data, tokenizer),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        phases = Phases(clock)
        phases.wrap(trainer, "_generate_single_turn", lambda *_, **__: "generate")
        phases.wrap(trainer, "_calculate_rewards", lambda *_, **__: "reward")
        phases.wrap(trainer, "_prepare_inputs", lambda *_, **__: "prepare")
        phases.wrap(trainer, "training_step", lambda *_, **__: "training_step")
        phases.wrap(
            trainer,
            "_get_per_token_logps_and_entropies",
            lambda model, *_, **__: scored_as(model, trainer.ref_model),
        )
        trainer.train()
    result = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")
        },
        "threads": torch.get_num_threads(),
        "cpu_s": clock.cpu_s,
        "wall_s": clock.wall_s,
        "phases": {
            name: [by_step[k] for k in range(args.steps)] for name, by_step in phases.cpu_s.items()
        },
        "rewards": scores.means,
        "lengths": scores.lengths,
        "children_s": sum(os.times()[2:4]),
    }
    args.out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
