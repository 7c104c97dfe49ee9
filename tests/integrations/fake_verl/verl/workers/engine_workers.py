"""The engine's worker: the two calls that are a stage each."""

from types import SimpleNamespace

from verl.utils import tensordict_utils as tu


class TrainingWorker:
    """One rank."""

    def __init__(
        self, engine, loss_fn=None, *, forward_only=False, model_type="language_model"
    ) -> None:  # fmt: skip
        self.engine, self.loss_fn = engine, loss_fn
        self.config = SimpleNamespace(model_type=model_type)
        self.engine_config = SimpleNamespace(forward_only=forward_only)

    def train_mini_batch(self, data):
        """One optimizer step a mini-batch; names of rows in the store are fetched first."""
        data = data.fetch() if hasattr(data, "fetch") else data
        for mini in tu.make_iterator(data, mini_batch_size=data["mini_batch_size"]):
            self.engine.forward_backward_batch(mini, self.loss_fn)
            self.engine.optimizer_step()

    def infer_batch(self, data):
        """Log-probs."""
        self.engine.forward_backward_batch(data, None, forward_only=True)
