"""The catalogue of codes: what each one means, what usually causes it, how it is mended.

Codes are stable and never reused. Families: ``DPA1xx`` structure, ``2xx`` masks and ids, ``3xx``
log-probs, ``4xx`` groups, rewards and advantages, ``5xx`` loss, ``6xx`` dynamics over steps,
``7xx`` ranks, ``8xx`` files, configuration and the run itself, ``9xx`` faults of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class CodedError(ValueError):
    """An error meant for a user: a code, one paragraph, and the remedy.

    ``exit_code`` is what the command line returns: 2 for wrong usage or unreadable input, 3 when
    the run itself failed, 4 for a fault of this package.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        self.code = code
        self.message = message
        self.remedy = remedy
        super().__init__(f"{code} {message}" + (f" {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.remedy)


class UsageError(CodedError):
    """Wrong configuration or unreadable input: nothing was started."""


class RunError(CodedError):
    """The run itself failed: a worker died, a reward function raised."""

    exit_code = 3


class InternalError(CodedError):
    """A fault of this package."""

    exit_code = 4


class ProtocolError(CodedError, AssertionError):
    """Misuse of :class:`~dataproto_audit.DataProto`; an ``AssertionError`` too, as verl raises."""

    def __init__(self, message: str, remedy: str = "", *, code: str = "DPA110") -> None:
        super().__init__(code, message, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_protocol_error, (self.message, self.remedy, self.code)


def _rebuild_protocol_error(message: str, remedy: str, code: str) -> ProtocolError:
    return ProtocolError(message, remedy, code=code)


@dataclass(frozen=True)
class Code:
    """One entry of the catalogue. ``causes`` is ranked, most frequent first."""

    code: str
    title: str
    meaning: str
    causes: tuple[str, ...] = ()
    fix: str = ""


CAUSES: dict[str, str] = {
    "shift": "a log-prob, mask or label is one or more columns off",
    "row_permutation": "the rows of one field are in another order than the rest of the batch",
    "tiled_groups": "samples were expanded as p0,p1,..,p0,p1,.. instead of p0,p0,..,p1,p1,..",
    "not_repeated": "one side of a merge was not repeated by n",
    "rows_lost": "rows were dropped or duplicated on the way",
    "wrong_width": "prompt and response widths were confused, or another padding was used",
    "wrong_dtype": "the field was written with another kind of number",
    "field_forgotten": "the stage did not write, or dropped, a field that it declares",
    "field_overwritten": "a stage changed a field that it only reads",
    "changed_between_stages": "something between two stages changed the batch",
    "mask_on_padding": "the response mask covers padding, so padding is trained on",
    "mask_hole": "the response mask leaves out sampled tokens",
    "mask_from_prompt": "the mask was cut from the prompt part or built with another length",
    "left_right_padding": "prompts must be padded left and responses right",
    "stale_buffer": "padding slots hold ids of an earlier batch",
    "wrong_position_ids": "positions were not derived from the attention mask",
    "silent_truncation": "a response ended without a stop token before the length limit",
    "wrong_stop_token": "engine and trainer disagree about the stop token",
    "stale_rollout_weights": "the rollout engine did not receive the trainer's weights",
    "stale_prefix_cache": "the engine's prefix cache was not reset after a weight sync",
    "tied_head_not_updated": "the output layer tied to the embedding kept its old weights",
    "temperature_mismatch": "rollout and trainer scale logits by different temperatures",
    "sampling_filter": "top-p or top-k renormalised the rollout's log-probs",
    "precision": "the two sides run in different precision",
    "dropout_on": "dropout was active in a log-prob pass",
    "reference_not_frozen": "the reference model is not the checkpoint the actor started from",
    "non_finite": "a NaN or infinity came out of the model or the reward",
    "positive_log_prob": "the value is not a log-probability (sign, or logits instead)",
    "cross_row_leakage": "tokens of one row attend to tokens of another",
    "split_group": "a group has more or fewer rows than n",
    "uid_after_repeat": "uids were drawn after the repeat, so every row is its own group",
    "uid_reused": "two prompts share one uid",
    "reward_on_padding": "the reward sits on a pad slot and is masked away",
    "reward_shifted": "the reward sits on another token than the last one of the response",
    "reward_lost": "the token-level reward does not carry the scalar score",
    "reward_rows_shifted": "scores are attached to the wrong rows",
    "wrong_group_normalisation": "another group mean, std or eps was used than configured",
    "advantage_off_mask": "advantages are not zero outside the response mask",
    "loss_depends_on_split": "the loss was averaged per micro-batch instead of over all tokens",
    "wrong_normaliser": "the loss was divided by another count than the configured one",
    "wrong_kl_estimator": "another KL estimator, sign or argument order was used",
    "wrong_clip": "another clip range was used than configured",
    "learning_rate_too_high": "the policy moves too far in one step",
    "policy_collapse": "the policy has become nearly deterministic",
    "bad_row": "a single row dominates the gradient",
    "unbalanced_ranks": "one rank has many more tokens than another",
    "unequal_micro_batches": "ranks run different numbers of micro-batches: a hang is coming",
    "token_limit_exceeded": "a micro-batch holds more tokens than its limit",
    "lost_micro_batch": "rows are missing from, or repeated in, the micro-batches",
    "engine_setting": "the engine was asked for other settings than the configuration says",
}

_ENTRIES: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    # -- 1xx structure ---------------------------------------------------------------------------
    ("DPA101", "a declared field is missing",
     "A stage reads or adds this field, and the batch does not have it.",
     ("field_forgotten",), "Write the field in its producer stage, or declare it optional."),
    ("DPA102", "a field has another kind of number than declared",
     "Ids, masks and positions are integers, log-probs, rewards and advantages are floats.",
     ("wrong_dtype",), "Convert at the producer."),
    ("DPA103", "the sizes of fields disagree",
     "A field's shape does not fit its declared axes, whose sizes are bound by the whole batch.",
     ("wrong_width", "not_repeated", "rows_lost"),
     "The quotient in the evidence tells which expansion is missing."),
    ("DPA104", "a stage changed the number of rows against its declaration",
     "Each stage declares a row relation: same, expand, permute, drop, pad, split or concat.",
     ("not_repeated", "rows_lost"), "Repeat both sides by n, in the same order."),
    ("DPA105", "rows were lost, duplicated or reordered",
     "Row keys (uid, prompt, response) after the stage are not those before it.",
     ("row_permutation", "rows_lost"), "Apply one index to every field of the batch."),
    ("DPA106", "a stage changed a field that it declares as kept",
     "The values of a kept field differ, row key by row key, from those before the stage.",
     ("field_overwritten", "row_permutation"), "Copy before changing in place."),
    ("DPA107", "a field was dropped that the stage declares as kept",
     "The field was there before the stage and is gone after it.",
     ("field_forgotten",), "Keep the field, or declare that the stage drops it."),
    ("DPA108", "log-probs differ in precision",
     "Old, reference and rollout log-probs come in different dtypes.",
     ("precision", "wrong_dtype"), "Harmless if intended; gaps of that precision are expected."),
    ("DPA109", "a non-tensor field does not fit the rows",
     "Every non-tensor array holds one entry per row.",
     ("rows_lost", "not_repeated"), "Build it together with the rows."),
    ("DPA110", "wrong use of DataProto",
     "An operation on the batch is not defined for what it was given.", (), ""),
    ("DPA111", "a stage used other settings than configured",
     "A stage reports the settings it ran with, and they differ from the configuration.",
     ("engine_setting", "temperature_mismatch"), "Pass the configured value to the engine."),
    ("DPA113", "the batch changed between two stages",
     "What enters this stage differs from what left the one before it.",
     ("changed_between_stages",), "Look at the code between the two stages."),
    # -- 2xx masks and ids -----------------------------------------------------------------------
    ("DPA201", "a mask holds values other than 0 and 1",
     "Masks are counted and multiplied; any other value scales the loss.",
     ("wrong_dtype", "stale_buffer"), "Write 0/1 masks."),
    ("DPA202", "padding is on the wrong side",
     "Prompts are padded left, responses right, so a row reads 0..0 1..1 | 1..1 0..0.",
     ("left_right_padding",), "Pad prompts left and responses right."),
    ("DPA203", "input_ids are not the prompt followed by the response",
     "input_ids[:, :P] == prompts and input_ids[:, P:] == responses, id by id.",
     ("shift", "row_permutation", "stale_buffer"), "Concatenate after every truncation."),
    ("DPA204", "position_ids do not count the attended tokens",
     "position_ids == clip(cumsum(attention_mask) - 1, 0).",
     ("wrong_position_ids", "left_right_padding"), "Derive positions from the attention mask."),
    ("DPA205", "the response mask covers padding",
     "response_mask <= attention_mask[:, -R:]; a violation trains on padding.",
     ("mask_on_padding", "mask_from_prompt"), "Multiply by the response's attention mask."),
    ("DPA206", "a response ends without a stop token before the length limit",
     "The last attended id is a stop id, or the response fills the limit.",
     ("silent_truncation", "wrong_stop_token"), "Compare the engine's stop ids and limit."),
    ("DPA207", "padding slots do not hold the pad id",
     "Ids where the attention mask is 0 equal the pad id.",
     ("stale_buffer", "left_right_padding"), "Fill padding with the pad id."),
    ("DPA208", "the response mask leaves out sampled tokens",
     "In a single-turn run without rejection the mask equals the response's attention mask.",
     ("mask_hole", "shift", "mask_from_prompt"), "Build the mask from the response's attention."),
    # -- 3xx log-probs ---------------------------------------------------------------------------
    ("DPA301", "a log-prob on a trained token is not finite",
     "NaN and infinity spread to the whole loss.",
     ("non_finite", "precision"), "Look at the named rows' ids and the model's logits."),
    ("DPA302", "a log-prob is above zero",
     "A log-probability is at most 0, but for rounding (1e-4 in float32, 0.1 in half precision).",
     ("positive_log_prob",), "Check for a missing log-softmax or a sign."),
    ("DPA303", "rollout and old log-probs disagree more than their noise model allows",
     "Same weights, temperature and precision must give the same log-probs.",
     ("stale_rollout_weights", "temperature_mismatch", "shift", "sampling_filter", "precision"),
     "The first cause is the one whose repair made the gap vanish."),
    ("DPA304", "log-probs are shifted by columns",
     "Shifting one side makes a large gap vanish: column t scores another token than responses[t].",
     ("shift",), "Slice logits [-R-1:-1] for labels responses."),
    ("DPA305", "old and reference log-probs differ at the first step",
     "Actor and reference start from one checkpoint and run in the same precision.",
     ("reference_not_frozen", "temperature_mismatch", "dropout_on", "precision"),
     "Compare checkpoint, dtype, adapter and temperature of both roles."),
    ("DPA306", "the same token after the same prefix has two log-probs",
     "Rows of a group share prefixes, and a log-prob depends on the prefix alone.",
     ("row_permutation", "shift", "cross_row_leakage"), "Look at the two named rows."),
    ("DPA307", "log-probs after one prefix sum to more than one",
     "The probabilities of distinct next tokens after one prefix sum to at most 1.",
     ("shift", "positive_log_prob", "row_permutation"), "Look at the named rows and column."),
    # -- 4xx groups, rewards, advantages ---------------------------------------------------------
    ("DPA401", "a group does not have n rows",
     "Each uid occurs exactly n times.",
     ("split_group", "uid_after_repeat", "rows_lost"), "Draw uids before the repeat by n."),
    ("DPA402", "rows of one group have different prompts",
     "A group is n samples of one prompt; the baseline is wrong otherwise.",
     ("tiled_groups", "row_permutation", "not_repeated"),
     "Expand both sides of the union in the same, interleaved order."),
    ("DPA403", "one prompt carries several uids, or the uids are not distinct per prompt row",
     "The number of groups is the number of prompts before the repeat.",
     ("uid_after_repeat", "uid_reused"), "Draw one uid per prompt, before the repeat."),
    ("DPA404", "rows of a group are not adjacent where they must be",
     "Before balancing, rows i*n .. i*n+n-1 are one group.",
     ("tiled_groups", "row_permutation"), "repeat(n, interleave=True) on both sides."),
    ("DPA405", "the reward is not on the last token of the response",
     "An outcome reward has one non-zero entry, at the last attended response token.",
     ("reward_on_padding", "reward_shifted", "row_permutation"),
     "Write it at sum(response attention) - 1."),
    ("DPA406", "token-level scores do not sum to the scalar score",
     "The row sum of token_level_scores is the score that the reward function returned.",
     ("reward_lost", "reward_rows_shifted", "row_permutation"), "Scatter each row's own score."),
    ("DPA407", "a reward is not finite",
     "A NaN score makes the whole group's advantages NaN.",
     ("non_finite",), "Return a finite score for every row."),
    ("DPA408", "advantages differ from their recomputation",
     "Advantages recomputed in float64 from rewards, mask and uid by the configured estimator.",
     ("wrong_group_normalisation", "row_permutation", "tiled_groups", "advantage_off_mask"),
     "The evidence names the rule that does fit, if one does."),
    ("DPA409", "advantages are not zero outside the response mask",
     "Group-relative advantages are broadcast over the trained tokens only.",
     ("advantage_off_mask", "mask_from_prompt"), "Multiply by the response mask."),
    ("DPA410", "a recomputed reward differs from the stored one",
     "Scoring the decoded response again gives another score.",
     ("reward_rows_shifted", "reward_lost"), "Look at the named rows' text and ground truth."),
    # -- 5xx loss --------------------------------------------------------------------------------
    ("DPA501", "the ratio is not 1 on the first mini-batch",
     "Before any update the new log-probs equal the old ones.",
     ("shift", "dropout_on", "temperature_mismatch", "row_permutation", "precision"),
     "Compare the two passes' inputs, temperature and dropout."),
    ("DPA502", "the loss differs from the unsplit recomputation",
     "The loss of a mini-batch, recomputed in float64 on one device over all of its rows.",
     ("loss_depends_on_split", "wrong_normaliser", "wrong_kl_estimator", "wrong_clip"),
     "Divide by the mini-batch's global token count, whatever the split."),
    ("DPA503", "the loss was normalised by another count",
     "The token count used differs from the sum of the response mask over the mini-batch.",
     ("wrong_normaliser", "loss_depends_on_split"), "All-reduce the count over ranks."),
    # -- 6xx dynamics ----------------------------------------------------------------------------
    ("DPA601", "a metric is not finite",
     "Loss, KL, entropy and gradient norm are finite numbers.",
     ("non_finite", "bad_row"), "Look at this step's rows with the largest gaps."),
    ("DPA602", "the KL to the old policy or reference jumped",
     "The metric lies far outside its own recent history.",
     ("learning_rate_too_high", "bad_row", "stale_rollout_weights"),
     "Look at the first step that jumped, not at the largest."),
    ("DPA603", "the gradient norm jumped",
     "The metric lies far outside its own recent history.",
     ("bad_row", "learning_rate_too_high", "wrong_normaliser"), "Compare rows and normaliser."),
    ("DPA604", "the entropy collapsed or left its bounds",
     "Entropy lies between 0 and log(vocabulary).",
     ("policy_collapse", "learning_rate_too_high", "temperature_mismatch"),
     "Lower the learning rate or add an entropy bonus."),
    ("DPA605", "the rollout engine does not hold the trainer's weights",
     "Checksums of trainer and engine weights, tensor by tensor, after the sync.",
     ("stale_rollout_weights", "tied_head_not_updated"), "Sync again; check tied embeddings."),
    ("DPA606", "the rollout engine scores tokens unlike the trainer after the sync",
     "Log-probs of a few fixed rows from engine and trainer, after the weights arrived.",
     ("tied_head_not_updated", "stale_prefix_cache", "stale_rollout_weights", "precision"),
     "Reset the prefix cache; re-pack the output layer."),
    # -- 7xx ranks -------------------------------------------------------------------------------
    ("DPA701", "ranks hold different numbers of rows",
     "The batch is cut into equal chunks over data-parallel ranks.",
     ("rows_lost", "unbalanced_ranks"), "Pad or balance to a multiple of the ranks."),
    ("DPA702", "tokens are unevenly spread over ranks",
     "The step waits for the fullest rank.",
     ("unbalanced_ranks",), "Balance rows by length before the dispatch."),
    ("DPA703", "micro-batches are no partition of the mini-batch",
     "Every row of the mini-batch is in exactly one micro-batch.",
     ("lost_micro_batch",), "Check the index lists of the split."),
    ("DPA704", "a micro-batch holds more tokens than its limit",
     "The token limit bounds peak memory; it is hard.",
     ("token_limit_exceeded",), "Open another micro-batch instead of overfilling one."),
    ("DPA705", "ranks run different numbers of micro-batches",
     "Collectives inside a micro-batch then wait for a peer that never comes.",
     ("unequal_micro_batches",), "Agree on the maximum count over ranks."),
    # -- 8xx files, configuration, the run -------------------------------------------------------
    ("DPA801", "the run folder is in use",
     "Another run writes into this folder, or finished in it.", (),
     "Choose another trainer.run_dir, or pass --overwrite."),
    ("DPA802", "the disk is full or the folder is not writable",
     "A table or checkpoint could not be written; what was written before is intact.", (),
     "Free space or choose another folder."),
    ("DPA803", "a table or run folder cannot be read",
     "The file is missing, empty or of another schema.", (), "Name a folder written by train."),
    ("DPA804", "a checkpoint cannot be read",
     "The checkpoint is incomplete or of another layout.", (), "Resume from an earlier one."),
    ("DPA810", "a saved batch cannot be read",
     "The file is empty, truncated, or no DataProto.", (), "Save it again with save_to_disk."),
    ("DPA811", "a saved batch asks for code",
     "The file names something off the allow-list; nothing of it was executed.", (),
     "Open it only where you trust its origin."),
    ("DPA850", "unknown configuration key",
     "The key does not exist; the nearest existing one is suggested.", (), "Correct the key."),
    ("DPA851", "invalid configuration value",
     "The value is outside what the key takes.", (), "Choose one of the listed values."),
    ("DPA852", "the model folder is incomplete",
     "config.json, weights and a tokenizer are needed.", (), "Save model and tokenizer there."),
    ("DPA853", "a prompt is longer than data.max_prompt_length",
     "Truncated prompts change the task, so they are refused unless asked for.", (),
     "Set data.filter_overlong_prompts=true, or raise the limit."),
    ("DPA854", "the batch cannot be divided as configured",
     "Rows must divide over mini-batches, ranks and micro-batches.", (), "Change one of them."),
    ("DPA855", "a group-relative estimator needs n > 1",
     "With one sample per prompt the group has no baseline.", (), "Set rollout.n >= 2."),
    ("DPA856", "a row is longer than the token limit of a micro-batch",
     "The limit is hard, and a row cannot be split.", (), "Raise the token limit."),
    ("DPA857", "a data file cannot be read",
     "parquet and JSONL in verl's schema are read, and reasoning-gym generators by name.", (),
     "Check path and columns."),
    ("DPA858", "an optional part is not installed",
     "The configuration asks for an engine or library that is missing here.", (),
     "Install the named extra."),
    ("DPA860", "the reward function raised",
     "The user's reward function raised an exception.", (), "Mend it; the row is named."),
    ("DPA861", "the reward function returned something unusable",
     "One finite number is expected for each row.", (), "Return one finite score per row."),
    ("DPA863", "a worker raised an error",
     "A training rank raised; its peers were stopped.", (), "Resume from the last checkpoint."),
    ("DPA864", "a worker process died",
     "A training rank is gone; its peers were stopped.", (), "Resume from the last checkpoint."),
    ("DPA865", "the rollout engine died",
     "The rollout process is gone.", (), "Resume from the last checkpoint."),
    ("DPA866", "a collective timed out",
     "A rank waited for its peers longer than the time-out.", (), "See the named rank's stage."),
    ("DPA867", "the weights for the rollout engine do not fit together",
     "Pieces of a rank are missing, or ranks exported after different updates.", (),
     "Export from every rank after the same update."),
    ("DPA868", "Ray could not be started",
     "The processes that hold the workers did not come up.", (),
     "Check memory and the free space of the temporary folder; another Ray may be half-started."),
    # -- 9xx our own faults ----------------------------------------------------------------------
    ("DPA901", "a probe failed inside this package",
     "The probe is switched off for the rest of the run; training goes on.", (), "Report it."),
    ("DPA902", "the contract checker failed inside this package",
     "The contract of this stage is switched off; training goes on.", (), "Report it."),
    ("DPA903", "the tables could not be written",
     "Recording is switched off; training and checks go on.", (), "Check the disk; report it."),
)  # fmt: skip

CODES: dict[str, Code] = {entry[0]: Code(*entry) for entry in _ENTRIES}
