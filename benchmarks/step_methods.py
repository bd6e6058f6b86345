# SPDX-License-Identifier: Apache-2.0
"""The ways to train that bench_step.py compares: each takes a model and does whole steps, or raises Skip."""

import os
import socket
from importlib import metadata

import torch

from zenflow import ZenFlowOptimizer

LR, DECAY = 1e-5, 0.01
DEEPSPEED = "0.19.6"


class Skip(Exception):
    """Why a method cannot run here."""


def require_deepspeed():
    """Raises Skip unless the one release to compare with is installed."""
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise Skip(f"deepspeed is not installed: pip install deepspeed=={DEEPSPEED}") from None
    if found in ("0.19.7", "0.19.8"):
        raise Skip(f"deepspeed {found} scrambles weights at the start (stages 1 and 2): install {DEEPSPEED}")
    if found != DEEPSPEED:
        raise Skip(f"deepspeed {found} is installed, and {DEEPSPEED} is the one to compare with")


class Method:
    """Forward, backward, no update."""

    label = "forward and backward alone"

    def __init__(self, model, args):
        self.model, self.args = model, args

    def forward(self, batch):
        return self.model(batch)

    def step(self, batch):
        self.forward(batch).backward()
        self.update()

    def update(self):
        self.model.zero_grad()

    def publishes(self):
        """Whether the coming step makes a host update visible; None where every step is like another."""
        return None

    def facts(self):
        """What the method itself knows, after all steps."""
        return {}


class AdamW(Method):
    """All state on the device, in the parameters' dtype."""

    label = "AdamW fused, no offload"

    def __init__(self, model, args):
        super().__init__(model, args)
        self.optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY, fused=True)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class SynchronousOffload(Method):
    """ZeRO-Offload's schedule in plain torch: gradients leave during backward, then the device waits for an fp32 AdamW
    on the host and for the new weights."""

    label = "synchronous offload, plain torch"

    def __init__(self, model, args):
        super().__init__(model, args)
        self.parameters = list(model.parameters())
        self.on_gpu = self.parameters[0].is_cuda
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        pinned = {"device": "cpu", "pin_memory": self.on_gpu}
        self.gradients = {p: torch.empty(p.shape, dtype=p.dtype, **pinned) for p in self.parameters}
        self.weights = {p: torch.empty(p.shape, dtype=p.dtype, **pinned) for p in self.parameters}
        self.masters = [p.detach().to("cpu", torch.float32, copy=True) for p in self.parameters]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, LR, weight_decay=DECAY, fused=True)
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self._leave)

    def _leave(self, p):
        if not self.on_gpu:
            self.gradients[p].copy_(p.grad)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.gradients[p].copy_(p.grad, non_blocking=True)
            p.grad.record_stream(self.stream)
        p.grad = None

    @torch.no_grad()
    def update(self):
        if self.on_gpu:
            self.stream.synchronize()
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad.copy_(self.gradients[p])
        self.optimizer.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            self.weights[p].copy_(master)
            p.copy_(self.weights[p], non_blocking=True)


class TorchaoOffload(Method):
    """Overlaps each parameter's host update with the other copies; state in the parameters' dtype."""

    label = "torchao CPUOffloadOptimizer"

    def __init__(self, model, args):
        super().__init__(model, args)
        if not next(model.parameters()).is_cuda:
            raise Skip("it needs a GPU")
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise Skip(f"torchao is not installed or too old ({error})") from None
        self.optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LR, weight_decay=DECAY, fused=True
        )

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeedOffload(Method):
    label = f"DeepSpeed {DEEPSPEED} ZeRO-Offload"
    zenflow = None

    def __init__(self, model, args):
        super().__init__(model, args)
        parameter = next(model.parameters())
        if not parameter.is_cuda:
            raise Skip("it needs a GPU")
        require_deepspeed()
        import deepspeed

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        zero = {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        }
        if self.zenflow:
            zero["zenflow"] = self.zenflow(args)
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": parameter.dtype == torch.bfloat16},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
            "zero_optimization": zero,
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, batch):
        self.engine.backward(self.engine(batch))
        self.engine.step()


class DeepSpeedZenFlow(DeepSpeedOffload):
    label = f"DeepSpeed {DEEPSPEED} ZenFlow"

    @staticmethod
    def zenflow(args):
        return {
            "topk_ratio": args.topk_ratio,
            "select_strategy": "step",
            "select_interval": 16 * args.update_interval,
            "update_interval": args.update_interval,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        }


class ZenFlow(Method):
    label = "zenflow, default"
    hooks = False

    def __init__(self, model, args):
        super().__init__(model, args)
        self.optimizer = ZenFlowOptimizer(
            model.parameters(),
            LR,
            weight_decay=DECAY,
            topk_ratio=args.topk_ratio,
            update_interval=args.update_interval,
            update_delay=args.update_delay,
            offload_gradients=self.hooks,
        )

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def publishes(self):
        if self.optimizer._store is None:
            return False
        step, _, _, publish_at = self.optimizer._store.engine.clock
        return step + 1 == publish_at

    def facts(self):
        stats = self.optimizer.stats()
        total, steps = stats.total, max(1, stats.total.steps)
        return {
            "waits_for_host_seconds": total.stall_seconds / steps,
            "host_update_seconds": total.host_update_seconds / steps,
            "packed_d2h_bytes": total.d2h_bytes / steps,
            "published_h2d_bytes": total.h2d_bytes / steps,
            "host_bytes": stats.host_bytes,
            "device_bytes": stats.device_bytes,
        }


class ZenFlowHooks(ZenFlow):
    label = "zenflow, offload_gradients"
    hooks = True


METHODS = {
    "alone": Method,
    "adamw": AdamW,
    "synchronous": SynchronousOffload,
    "torchao": TorchaoOffload,
    "deepspeed": DeepSpeedOffload,
    "deepspeed-zenflow": DeepSpeedZenFlow,
    "zenflow": ZenFlow,
    "zenflow-hooks": ZenFlowHooks,
}
