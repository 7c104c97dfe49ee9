"""A training rank that tests look into."""

import torch

from dataproto_audit.trainer.workers.actor import TrainWorker


def probe_worker() -> type[TrainWorker]:
    """A worker whose spec can be changed and that keeps gradients, of the critic if there is one;
    local, so that Ray ships it."""

    class ProbeWorker(TrainWorker):
        def use(self, spec):
            from dataproto_audit.trainer.backends import shards
            from dataproto_audit.trainer.workers.actor import make_backend

            self.spec = spec
            device = torch.device("cpu")
            self.actor = make_backend(spec, device=device, optim=spec.optim)
            self.reference = make_backend(spec, device=device, optim=None)
            self.critic = None
            if spec.critic is not None:
                from dataproto_audit.trainer.compare.critic import set_head

                self.critic = make_backend(
                    spec, device=device, optim=spec.critic.optim, role="critic"
                )
                set_head(self.critic)
            self._reference_moved, self._version = False, 0
            self.kept = []
            watched = self.critic or self.actor
            step = watched.optimizer_step

            def keeping():
                gradients = {
                    name: (grad.clone(), piece)
                    for name, (grad, piece) in watched.gradients().items()
                }
                self.kept.append(
                    shards.pack(
                        gradients,
                        rank=self.rank,
                        world_size=self.world_size,
                        version=len(self.kept),
                        aliases={},
                    )
                )
                return step()

            watched.optimizer_step = keeping

        def gradients(self):
            return self.kept

        def critic_weights(self):
            from dataproto_audit.trainer.backends import shards

            where = {"rank": self.rank, "world_size": self.world_size}
            return shards.pack(self.critic.shards(), version=0, aliases={}, **where)

    return ProbeWorker
