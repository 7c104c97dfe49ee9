"""The engine's worker: the two calls that are a stage each."""

from types import SimpleNamespace


class TrainingWorker:
    """One rank."""

    def __init__(self, engine, loss_fn=None, *, forward_only=False) -> None:
        self.engine, self.loss_fn = engine, loss_fn
        self.config = SimpleNamespace(model_type="language_model")
        self.engine_config = SimpleNamespace(forward_only=forward_only)

    def train_mini_batch(self, data):
        """One optimizer step a mini-batch."""
        size = data["mini_batch_size"]
        for start in range(0, len(data), size):
            mini = data.rows(list(range(start, start + size)))
            self.engine.forward_backward_batch(mini, self.loss_fn)
            self.engine.optimizer_step()

    def infer_batch(self, data):
        """Log-probs."""
        self.engine.forward_backward_batch(data, None, forward_only=True)
