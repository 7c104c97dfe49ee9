"""A rollout engine for verl: one process per replica that samples token by token on a CPU.

It follows verl's interface of a server (``generate``) and of the adapter inside a worker
(``update_weights``). Sampling is seeded per request by its prompt and its number, so that runs
repeat.
"""

import hashlib
import os
from collections import Counter

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "tiny_server_{}"
MAX_NEW = 16
EMPTY = bool(os.environ.get("TINY_EMPTY"))
"""Every third answer is empty, as of an engine that aborted the request."""
SLEEPS = bool(os.environ.get("TINY_SLEEPS"))
"""Between being put to sleep and the next weights there are none to answer with."""


class TinyServer:
    """A causal model that answers one request after the other."""

    def __init__(self, path: str, replica: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.seen: Counter[tuple[int, ...]] = Counter()
        self.step, self.awake = None, True
        self.replica = f":{replica}" if replica else ""  # replicas draw other samples

    async def ready(self) -> bool:
        """The model is loaded."""
        return True

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        """Sample until the end token or the limit; log-probs at the sampling temperature.

        The padding id is never drawn, as with a logit mask: a random model would draw it once in
        fifty tokens. Log-probs are those before the mask.
        """
        if not self.awake:
            raise RuntimeError("asleep: the weights were given back")
        prompt = tuple(int(i) for i in prompt_ids)
        self.seen[prompt] += 1
        text = f"{self.step}:{self.seen[prompt]}:{prompt}{self.replica}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        aborted = EMPTY and not seed % 3
        ids, log_probs = ([], []) if aborted else self._sample(
            list(prompt), dict(sampling_params), seed
        )  # fmt: skip
        wanted = sampling_params.get("logprobs") not in (None, False)
        known = {"token_ids": ids, "log_probs": log_probs if wanted else None,
                 "stop_reason": "aborted" if aborted else "completed"}  # fmt: skip
        if "extra_fields" in TokenOutput.model_fields:
            known["extra_fields"] = {"global_steps": self.step}
        return TokenOutput(**known)

    def _sample(self, ids, params, seed):
        generator = torch.Generator().manual_seed(seed)
        heat = params.get("temperature", 1.0) or 0.0
        limit = params.get("max_tokens") or params.get("max_new_tokens") or MAX_NEW
        end, out, log_probs = self.model.config.eos_token_id, [], []
        while len(out) < limit and (not out or out[-1] != end):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids + out])).logits[0, -1].float()
            scores = torch.log_softmax(logits / heat if heat > 0 else logits, -1)
            allowed = scores.exp()
            allowed[self.model.config.pad_token_id] = 0.0
            drawn = torch.multinomial(allowed, 1, generator=generator)
            token = int(drawn) if heat > 0 else int(scores.argmax())
            out.append(token)
            log_probs.append(float(scores[token]))
        return out, log_probs

    async def load_weights(self, weights, step) -> None:
        """Take over the trainer's weights."""
        self.model.load_state_dict(weights, strict=False)
        self.step, self.awake = step, True
        self.seen.clear()
        print(f"tiny weights {step} {_mark(weights)}", flush=True)

    async def sleep(self, *_args, **_kwargs) -> None:
        """Give the weights back, where that is asked for."""
        self.awake = not SLEEPS

    async def set_global_steps(self, step) -> None:
        """Remember the step."""
        self.step = step

    async def get_server_address(self):
        """No socket: requests come as actor calls."""
        return "127.0.0.1", 0


async def _done(self, *_args, **_kwargs):
    return None


for _name in ("wake_up", "clear_kv_cache", "abort_all_requests", "resume_generation",
              "start_profile", "stop_profile"):  # fmt: skip
    setattr(TinyServer, _name, _done)


class TinyReplica(RolloutReplica):
    """One server per replica."""

    async def launch_servers(self) -> None:
        """Start it and wait until the model is loaded."""
        model = self.model_config
        path = model.get("path") if hasattr(model, "get") else model.path
        name = NAME.format(self.replica_rank)
        actor = ray.remote(TinyServer).options(name=name, num_cpus=0, max_concurrency=64)
        self._server_handle = actor.remote(str(path), self.replica_rank)
        await self._server_handle.ready.remote()
        self.servers = [self._server_handle]
        self._server_address = f"tiny-{self.replica_rank}"


class TinyAdapter(BaseRollout):
    """The worker's side: sends its weights to the server of its rank."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sleep_level, self.replica_rank, self.is_leader_rank = 2, 0, True

    async def resume(self, tags) -> None:
        """Nothing was freed."""

    async def release(self) -> None:
        """Nothing to free."""

    async def update_weights(self, weights, **kwargs) -> None:
        """Send a copy of every weight."""
        later = hasattr(weights, "__aiter__")
        pairs = [pair async for pair in weights] if later else list(weights)
        whole = {name: _copied(tensor) for name, tensor in pairs}
        server = ray.get_actor(NAME.format(torch.distributed.get_rank()))
        await server.load_weights.remote(whole, kwargs.get("global_steps"))


def _mark(weights) -> str:
    """Fingerprint of every bit of the weights."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def _copied(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().to("cpu", torch.float32, copy=True)
