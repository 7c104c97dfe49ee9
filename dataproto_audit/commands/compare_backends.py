"""``compare-backends``: whether layouts compute the same as transformers' model in one process."""

from __future__ import annotations

import math
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dataproto_audit.codes import UsageError
from dataproto_audit.commands.output import AsJson, print_json

if TYPE_CHECKING:
    from dataproto_audit.protocol import DataProto
    from dataproto_audit.trainer.compare.judge import Values

DEFAULT_LAYOUTS = "fsdp:1,fsdp:2,fsdp:2+packed+fused,fsdp:2+packed+ulysses=2"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare-backends")(compare_backends)


def compare_backends(
    path: Annotated[Path | None, typer.Argument(help="A saved batch, or a trace.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="A made batch of ragged rows.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="Model folder; with --demo a tiny one is made.")
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="fsdp:2,fsdp:2+ulysses=2+packed,megatron:tp=2,pp=2,...")
    ] = DEFAULT_LAYOUTS,
    rows: Annotated[int, typer.Option(min=1, help="Rows to use at most.")] = 16,
    temperature: Annotated[float, typer.Option(help="Of the log-probs.")] = 1.0,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare every layer; name the first that differs.")
    ] = False,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Compare a value model's step, too.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Run a batch through backends and layouts, and compare each with a single process."""
    if (path is None) != demo:
        raise UsageError("DPA851", "name a batch, or use --demo.", "One of the two is needed.")
    if path is not None and model is None:
        raise UsageError("DPA851", "log-probs of a file need its model.", "Add --model FOLDER.")
    if not temperature > 0:
        raise UsageError("DPA851", f"--temperature {temperature}.", "It must be positive.")
    with tempfile.TemporaryDirectory(prefix="dpa-") as scratch, redirect_stdout(sys.stderr):
        asked = _Asked(path, model, layouts, rows, temperature, layers, values)
        answer = _answer(asked, Path(scratch))
    if as_json:
        print_json(answer)
    else:
        print(_text(answer))
    if not all(entry["agree"] for entry in answer["layouts"]):
        raise typer.Exit(1)


class _Asked(NamedTuple):
    path: Path | None
    model: Path | None
    layouts: str
    rows: int
    temperature: float
    layers: bool
    values: bool


def _answer(asked: _Asked, scratch: Path) -> dict[str, Any]:
    from transformers.utils import logging

    from dataproto_audit.trainer.backends.base import ModelSpec
    from dataproto_audit.trainer.backends.hf import model_config
    from dataproto_audit.trainer.backends.scoring import FAMILIES
    from dataproto_audit.trainer.compare import batches, run
    from dataproto_audit.trainer.compare.layouts import parse_layouts
    from dataproto_audit.trainer.compare.pool import Pool

    logging.disable_progress_bar()
    path, rows = asked.path, asked.rows
    folder = asked.model or _tiny(scratch)
    _refuse_no_weights(folder)
    wanted = parse_layouts(asked.layouts, model=str(folder))
    if not wanted:
        raise UsageError("DPA851", "--layouts names none.", "As in fsdp:2,megatron:tp=2.")
    for layout in wanted:
        run.check(layout)
    known = model_config(ModelSpec(str(folder))).get("model_type") in FAMILIES
    if asked.layers and not known:
        raise UsageError(
            "DPA851", "--layers: the model's layers are not known by name.",
            f"Known are {', '.join(FAMILIES)}.",
        )  # fmt: skip
    reference = Reference(folder, layers=asked.layers, values=asked.values and known)
    parts = math.lcm(*(layout.data_parallel for layout in wanted))
    tensors = dict(_made(folder, rows).batch.items()) if path is None else _read(path)
    batch = batches.from_tensors(
        tensors, rows=rows, multiple_of=parts, temperature=asked.temperature
    )
    _refuse_ids(batch, int(model_config(ModelSpec(str(folder)))["vocab_size"]), folder)
    longest = int(batch.batch["attention_mask"].sum(-1).max())
    for layout in wanted:
        limit = layout.micro.max_tokens
        if limit and limit < longest:
            raise UsageError(
                "DPA856", f"layout {layout.name!r}: a row has {longest} tokens.",
                f"Give tokens={longest} or more; a row cannot be split.",
            )  # fmt: skip
    made = batches.complete(batch, reference.log_probs(batch))
    with Pool() as pool:
        compared = run.compare(
            batch, wanted, expected=reference, pool=pool, layers=asked.layers,
            told=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    return {
        "batch": str(path) if path else "demo",
        "model": str(asked.model) if asked.model else "tiny",
        "rows": len(batch),
        "tokens": int(batch.batch["attention_mask"].sum()),
        "made_fields": made,
        "layouts": [one.to_dict() for one in compared],
    }


class Reference:
    """The step by transformers' own model in this process, in float32; float64 after the logits."""

    def __init__(self, folder: Path, *, layers: bool = False, values: bool = False) -> None:
        self._folder, self._layers, self._values = folder, layers, values

    def log_probs(self, batch: DataProto) -> Any:
        """f64[rows, response]."""
        return self._scored(self._model(), batch)[0]

    def values(self, batch: DataProto, dtype: str) -> Values:
        """The step in float32, whatever ``dtype``."""
        return self._step("float32", "eager", batch)

    def noise(self, batch: DataProto, dtype: str) -> Values:
        """Rows one at a time and in another order, with another attention kernel; or ``dtype``."""
        if dtype != "float32":
            return self._step(dtype, "eager", batch)
        return self._step("float32", "sdpa", batch, alone=True)

    def _model(self, dtype: str = "float32", attention: str = "eager") -> Any:
        import torch

        from dataproto_audit.reference.logprobs import load_model

        kind = getattr(torch, dtype)
        return load_model(self._folder, dtype=kind, attn_implementation=attention)

    def _value_step(self, dtype: str, attention: str, batch: Any, *, alone: bool) -> Any:
        """Values of every row and gradients of the value loss, under the head that ranks take."""
        import torch

        from dataproto_audit.reference import values as reference
        from dataproto_audit.trainer.compare.critic import LOSS, drawn_head

        model: Any = reference.load_value_model(
            self._folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        drawn = drawn_head(model.score.in_features)
        model.load_state_dict(drawn, strict=False)
        values = reference.token_values(model, batch, rows_per_forward=1 if alone else None)
        tensors = {name: tensor.flip(0) if alone else tensor for name, tensor in batch.items()}
        clip = LOSS.cliprange_value
        gradients, _ = reference.grad_of_value_loss(model, tensors, clip=clip)
        return {
            "token_values": values,
            "value_gradients": {name: value.float() for name, value in gradients.items()},
        }

    def _scored(self, model: Any, batch: DataProto, *, alone: bool = False) -> Any:
        from dataproto_audit.reference.logprobs import token_log_probs

        tensors = batch.batch
        return token_log_probs(
            model,
            tensors["input_ids"],
            tensors["attention_mask"],
            tensors["position_ids"],
            int(tensors["responses"].shape[1]),
            temperature=float(batch.meta_info["temperature"]),
            rows_per_forward=1 if alone else None,
        )

    def _step(self, dtype: str, attention: str, batch: DataProto, *, alone: bool = False) -> Values:
        from dataproto_audit.reference.logprobs import grad_of_loss
        from dataproto_audit.reference.updates import AdamWState, adamw_step
        from dataproto_audit.trainer.compare.judge import Values
        from dataproto_audit.trainer.compare.run import LOSS, OPTIM, TERMS

        model = self._model(dtype, attention)
        log_probs, entropy = self._scored(model, batch, alone=alone)
        tensors = {
            name: tensor.flip(0) if alone else tensor for name, tensor in batch.batch.items()
        }
        gradients, terms = grad_of_loss(
            model,
            tensors,
            temperature=float(batch.meta_info["temperature"]),
            kl_loss_coef=LOSS.kl_loss_coef,
            kl_loss_type=LOSS.kl_loss_type,
            entropy_coeff=LOSS.entropy_coeff,
            clip_ratio_c=LOSS.clip_ratio_c,
        )
        named: Any = dict(terms)
        start = {name: value.detach().float() for name, value in model.named_parameters()}
        gradients = {name: value.float() for name, value in gradients.items()}
        after, _ = adamw_step(
            start, gradients, AdamWState(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps,
            weight_decay=OPTIM.weight_decay,
        )  # fmt: skip
        return Values(
            log_probs=log_probs,
            entropy=entropy,
            terms={name: float(named[name]) for name in TERMS},
            gradients=gradients,
            moved={name: after[name] - start[name] for name in start},
            layers=self._states(model, batch, alone=alone) if self._layers else {},
            **(
                self._value_step(dtype, attention, batch.batch, alone=alone) if self._values else {}
            ),
        )

    @staticmethod
    def _states(model: Any, batch: DataProto, *, alone: bool) -> Any:
        from dataproto_audit.reference.layers import layer_outputs

        fields = [batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")]
        return layer_outputs(model, *fields, rows_per_forward=1 if alone else None)


def _tiny(scratch: Path) -> Path:
    from dataproto_audit.trainer.models import TinyModel, write_tiny_model

    sizes = TinyModel(
        charset="arithmetic", num_hidden_layers=4, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    return write_tiny_model(scratch / "model", sizes)


def _made(folder: Path, rows: int) -> DataProto:
    from dataproto_audit.trainer.backends.base import ModelSpec
    from dataproto_audit.trainer.backends.hf import model_config
    from dataproto_audit.trainer.compare.batches import demo_batch

    return demo_batch(vocab_size=int(model_config(ModelSpec(str(folder)))["vocab_size"]), rows=rows)


def _refuse_no_weights(folder: Path) -> None:
    from dataproto_audit.trainer.models import holds_weights

    if folder.is_dir() and not holds_weights(folder):
        raise UsageError(
            "DPA852", f"{folder} holds no weights (*.safetensors).", "Save the model there."
        )


def _refuse_ids(batch: DataProto, vocabulary: int, folder: Path) -> None:
    ids = batch.batch["input_ids"]
    beyond = ((ids < 0) | (ids >= vocabulary)).nonzero()
    if len(beyond):
        row, column = beyond[0].tolist()
        raise UsageError(
            "DPA851",
            f"input_ids holds {int(ids[row, column])} at row {row}, column {column}; {folder} has "
            f"a vocabulary of {vocabulary} tokens.",
            "Give the model that the batch was made with.",
        )


def _read(path: Path) -> dict[str, Any]:
    """The tensors of the last batch that an update can start from."""
    from dataproto_audit.dump.readers import read_batches

    chosen: dict[str, Any] | None = None
    for saved in read_batches(path):
        if not {"input_ids", "responses"} <= set(saved.tensors):
            continue
        if chosen is None or "advantages" in saved.tensors or "advantages" not in chosen:
            chosen = dict(saved.tensors)
    if chosen is None:
        raise UsageError(
            "DPA851", f"{path} holds no batch with responses.", "Give one from update_actor."
        )
    return chosen


def _more(entry: dict[str, Any]) -> str:
    """What is known of the first place that differs."""
    gap = next((g for g in entry.get("layers", ()) if g["name"] == entry["first_wrong"]), None)
    if gap is not None:
        (row, column), rank = gap["worst"], gap["rank"]
        return f" (rank {rank}, row {row}, column {column}: {gap['max_abs_diff']:.1e})"
    if entry["first_wrong"].startswith("gradient"):
        names, factor = entry["wrong_gradients"], entry["gradient_factor"]
        return f" and {len(names) - 1} more" + (
            "" if factor is None else f", all {factor:.4g} times the expected ones"
        )
    return ""


def _of(entry: dict[str, Any], name: str) -> str:
    """A difference and the bound that it was judged by."""
    bound = entry["tolerance"].get(name)
    blind = ", not judged" if name in entry.get("not_judged", ()) else ""
    return f"{entry[name]:.1e}" + ("" if bound is None else f" of {bound:.1e}{blind}")


def _value_text(entry: dict[str, Any]) -> str:
    if "max_abs_value_diff" not in entry:
        return ""
    gap, gradient = (_of(entry, f"max_abs_value_{name}") for name in ("diff", "grad_diff"))
    return f"  value {gap} (gradient {gradient})"


def _layers_text(entry: dict[str, Any]) -> str:
    """With ``--layers``, the layer that comes nearest to its bound."""
    gaps = entry.get("layers") or ()
    if not gaps:
        return ""
    worst = max(gaps, key=lambda gap: gap["max_abs_diff"] / gap["bound"])
    return f"; {len(gaps)} layers, worst {worst['name']} {worst['max_abs_diff']:.1e} of " + (
        f"{worst['bound']:.1e}"
    )


def _text(answer: dict[str, Any]) -> str:
    lines = [f"{answer['rows']} rows, {answer['tokens']} tokens, model {answer['model']}"]
    for entry in answer["layouts"]:
        if not entry["ranks"]:
            lines.append(f"{entry['name']}: COULD NOT RUN: {' '.join(entry['wrong'])}")
            continue
        verdict = "agrees" if entry["agree"] else "DIFFERS: " + ", ".join(entry["wrong"])
        if entry["first_wrong"]:
            verdict += f"; first in {entry['first_wrong']}" + _more(entry)
        row, column = entry["worst_logprob"]
        lines += [
            f"{entry['name']}: {verdict}" + _layers_text(entry),
            f"  log-prob {_of(entry, 'max_abs_logprob_diff')} (row {row}, column {column})"
            f"  entropy {_of(entry, 'max_abs_entropy_diff')}"
            f"  loss {_of(entry, 'rel_loss_diff')} ({entry['worst_term']})",
            f"  gradient {_of(entry, 'max_abs_grad_diff')} ({entry['worst_gradient']})"
            f"  update {_of(entry, 'rel_update_diff')}" + _value_text(entry),
            f"  peak {entry['peak_bytes'] / 2**20:.2f} MiB, sent "
            f"{entry['comm_bytes'] / 2**20:.2f} MiB a rank and step, start {entry['startup_s']:.1f}"
            f" s, step {entry['step_cpu_s']:.2f} CPU s",
        ]
    return "\n".join(lines)
