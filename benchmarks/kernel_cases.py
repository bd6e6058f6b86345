# SPDX-License-Identifier: Apache-2.0
"""One case for each device kernel: the call, the same work in plain torch, and the bytes that it has to move.

`useful` bytes are those that the work is about, each once; `sectors` counts whole 32-byte sectors where accesses are
scattered, and what a kernel writes for itself. A copy counts its reads and its writes, and so does everything here.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import kernels
from kernels import Columns, Rule, State

SECTOR = 32
NORM_ROWS = 128
RULE = Rule(lr=1e-5, step=100)


def agree(a, b):
    """Whether two states hold the same but for rounding; torch's own operations round in other places."""
    close = torch.allclose(a.master, b.master, rtol=1e-5, atol=1e-7)
    return close and torch.allclose(a.weight.float(), b.weight.float(), rtol=1e-2, atol=1e-6)


@dataclass
class Case:
    name: str
    ours: Callable[[], None]
    torch: Callable[[], None]
    useful: int = 0  # 0: too little to speak of bandwidth
    sectors: int = 0
    same: Callable[[], bool] = field(default=lambda: True)  # after both ran: do they agree?


class Workload:
    """A parameter's tensors on a device, from which cases are made.

    Args:
        megabytes: size of the gradient.
        adopt: called with each tensor that kernels will see; the emulated device wants to know them.
    """

    def __init__(self, device, stream, *, megabytes, columns, dtype, topk_ratio, adopt=lambda tensor: tensor):
        self.device, self.stream, self.adopt, self.dtype = device, stream, adopt, dtype
        self.columns = columns
        self.item = torch.empty((), dtype=dtype).element_size()
        self.rows = max(1, (megabytes << 20) // (columns * self.item))
        self.width = max(1, int(topk_ratio * columns + 0.5))
        self.slots = columns - self.width
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(columns, generator=generator)[: self.width].sort().values
        mask = torch.ones(columns, dtype=torch.bool)
        mask[chosen] = False
        self.selected = chosen.to(device)
        self.deferred = mask.nonzero().flatten().to(device)
        place = self.new(columns, dtype=torch.int32)
        self.map = Columns(adopt(self.deferred.int()), adopt(self.selected.int()), place)
        kernels.build_place(self.map, stream)
        self.gradient = self.random(self.rows, columns)
        self.bytes = self.gradient.nbytes
        self.sectors_of_selected = self._sectors(self.selected)
        self.sectors_of_deferred = self._sectors(self.deferred)

    def new(self, *shape, dtype=torch.float32):
        return self.adopt(torch.zeros(shape, dtype=dtype, device=self.device))

    def random(self, *shape, dtype=None):
        return self.adopt(torch.randn(shape, dtype=torch.float32, device=self.device).to(dtype or self.dtype))

    def state(self, width):
        """A weight whose masters lie near it, with moments of ordinary size."""
        weight = self.random(self.rows, self.columns)
        columns = self.selected if width == self.width else slice(None)
        master = self.adopt(weight[:, columns].float().contiguous())
        squares = self.adopt(self.random(self.rows, width, dtype=torch.float32).square_())
        return State(weight, master, self.random(self.rows, width, dtype=torch.float32), squares)

    def copy_of(self, state):
        return State(*(self.adopt(t.clone()) for t in (state.weight, state.master, state.exp_avg, state.exp_avg_sq)))

    def _sectors(self, columns):
        """Bytes of the sectors that these columns touch in a matrix of the parameter's dtype, rows aligned."""
        return self.rows * SECTOR * len((columns * self.item // SECTOR).unique())

    # The cases

    def all(self):
        return [
            self.column_norms(),
            self.norms_of_many(),
            self.selective_adam(),
            self.split_gradient(),
            self.unpack(),
            self.adam_whole(),
            self.adam_selected(),
            self.scatter(False),
            self.scatter(True),
            self.gather(),
            self.scatter_columns(),
            self.column_checksums(),
            self.adopt_edits(),
            self.build_place(),
            *(self.top_k(columns) for columns in (4096, 28_672)),
        ]

    def column_norms(self):
        norms, plain = [self.new(self.columns)], self.new(self.columns)
        scratch = self.new(max(1, kernels.column_norms_scratch([self.gradient], norms)))
        partial = 4 * self.columns * -(-self.rows // NORM_ROWS)

        def in_torch():
            plain.copy_(self.gradient.float().square().sum(0))

        return Case(
            "column_norms",
            lambda: kernels.column_norms([self.gradient], norms, scratch, self.stream),
            in_torch,
            useful=self.bytes + 4 * self.columns,
            sectors=self.bytes + 2 * partial + 4 * self.columns,
            same=lambda: torch.allclose(norms[0], plain, rtol=1e-4),
        )

    def norms_of_many(self):
        """The global norm of 300 parameters, from their column norms to the coefficient."""
        rows = [self.random(2048, dtype=torch.float32).square_() for _ in range(300)]
        shapes = [row.view(1, -1) for row in rows]
        squared, norm = self.new(300, dtype=torch.float64), self.new(1, dtype=torch.float64)
        coefficient, plain = self.new(1), self.new(1)

        def ours():
            kernels.squared_norms(shapes, rows, squared, self.stream)
            kernels.clip_coefficient(squared, 1.0, norm, coefficient, self.stream)

        def in_torch():
            total = torch.stack([row.sum(dtype=torch.float64) for row in rows]).sum().sqrt()
            plain.copy_((1.0 / (total + 1e-6)).clamp(max=1.0))

        return Case("norm of 300 parameters", ours, in_torch, same=lambda: torch.allclose(coefficient, plain))

    def _adam_in_torch(self, state, gradient, columns=None):
        """The update with torch's own operations; returns nothing."""
        m, v, master = state.exp_avg, state.exp_avg_sq, state.master
        g = (gradient if columns is None else gradient.index_select(1, columns)).float()
        beta1, beta2 = RULE.betas
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt().mul_((1 - beta2**RULE.step) ** -0.5).add_(RULE.eps)
        master.mul_(1 - RULE.lr * RULE.weight_decay).addcdiv_(m, root, value=-RULE.lr / (1 - beta1**RULE.step))
        if columns is None:
            state.weight.copy_(master)
        else:
            state.weight.index_copy_(1, columns, master.to(self.dtype))

    def selective_adam(self):
        ours = self.state(self.width)
        plain = self.copy_of(ours)
        packed, peer = (
            self.new(self.rows, self.slots, dtype=self.dtype),
            self.new(self.rows, self.slots, dtype=self.dtype),
        )

        def in_torch():
            torch.index_select(self.gradient, 1, self.deferred, out=peer)
            self._adam_in_torch(plain, self.gradient, self.selected)

        selected = self.rows * self.width
        rest = self.bytes + packed.nbytes + 24 * selected
        return Case(
            "selective_adam",
            lambda: kernels.selective_adam(self.gradient, self.map, packed, ours, RULE, self.stream),
            in_torch,
            useful=rest + 2 * self.item * selected,
            sectors=rest + 2 * self.sectors_of_selected,
            same=lambda: torch.equal(packed, peer) and agree(ours, plain),
        )

    def split_gradient(self):
        packed, kept, packed_peer, kept_peer = self._halves()

        def in_torch():
            torch.index_select(self.gradient, 1, self.deferred, out=packed_peer)
            torch.index_select(self.gradient, 1, self.selected, out=kept_peer)

        return Case(
            "selective_adam, kept",
            lambda: kernels.split_gradient(self.gradient, self.map, packed, kept, self.stream),
            in_torch,
            useful=2 * self.bytes,
            sectors=2 * self.bytes,
            same=lambda: torch.equal(packed, packed_peer) and torch.equal(kept, kept_peer),
        )

    def _halves(self):
        sizes = (self.slots, self.width, self.slots, self.width)
        return [self.new(self.rows, size, dtype=self.dtype) for size in sizes]

    def unpack(self):
        packed, kept, _, _ = self._halves()
        packed.copy_(self.gradient[:, self.deferred])
        kept.copy_(self.gradient[:, self.selected])
        back, peer = (self.new(self.rows, self.columns, dtype=self.dtype) for _ in range(2))

        def in_torch():
            peer.index_copy_(1, self.deferred, packed)
            peer.index_copy_(1, self.selected, kept)

        return Case(
            "unpack",
            lambda: kernels.unpack(back, self.map, packed, kept, self.stream),
            in_torch,
            useful=2 * self.bytes,
            sectors=2 * self.bytes,
            same=lambda: torch.equal(back, peer),
        )

    def adam_whole(self):
        ours = self.state(self.columns)
        plain = self.copy_of(ours)
        tasks = [kernels.adam_task(self.gradient, ours, RULE)]
        moved = self.rows * self.columns * (24 + 3 * self.item)
        return Case(
            "adam, whole",
            lambda: kernels.adam(tasks, self.stream),
            lambda: self._adam_in_torch(plain, self.gradient),
            useful=moved,
            sectors=moved,
            same=lambda: agree(ours, plain),
        )

    def adam_selected(self):
        ours = self.state(self.width)
        plain = self.copy_of(ours)
        plain.weight = self.adopt(ours.weight[:, self.selected].contiguous())
        whole = self.adopt(ours.weight.clone())
        kept = self.adopt(self.gradient[:, self.selected].contiguous())
        tasks = [kernels.adam_task(kept, ours, RULE, device_columns=self.map.device_columns)]

        def in_torch():
            self._adam_in_torch(plain, kept)
            whole.index_copy_(1, self.selected, plain.weight)

        rest = self.rows * self.width * (24 + self.item)
        return Case(
            "adam, kept selected",
            lambda: kernels.adam(tasks, self.stream),
            in_torch,
            useful=rest + 2 * self.item * self.rows * self.width,
            sectors=rest + 2 * self.sectors_of_selected,
            same=lambda: torch.allclose(ours.master, plain.master, rtol=1e-5, atol=1e-7),
        )

    def scatter(self, sums):
        upload = self.random(self.rows, self.slots)
        ours, plain = (self.new(self.rows, self.columns, dtype=self.dtype) for _ in range(2))
        checksums = self.new(self.slots, dtype=torch.int64) if sums else None

        def call():
            kernels.scatter(upload, ours, self.map, self.stream, checksums=checksums)

        return Case(
            "scatter, checksums" if sums else "scatter",
            call,
            lambda: plain.index_copy_(1, self.deferred, upload),
            useful=2 * upload.nbytes,
            sectors=upload.nbytes + self.sectors_of_deferred,
            same=lambda: torch.equal(ours, plain),
        )

    def gather(self):
        out, peer = (self.new(self.rows, self.width, dtype=self.dtype) for _ in range(2))
        return Case(
            "gather_columns",
            lambda: kernels.gather_columns(self.gradient, self.map.device_columns, out, self.stream),
            lambda: torch.index_select(self.gradient, 1, self.selected, out=peer),
            useful=2 * out.nbytes,
            sectors=self.sectors_of_selected + out.nbytes,
            same=lambda: torch.equal(out, peer),
        )

    def scatter_columns(self):
        source = self.random(self.rows, self.width)
        ours, plain = (self.new(self.rows, self.columns, dtype=self.dtype) for _ in range(2))
        return Case(
            "scatter_columns",
            lambda: kernels.scatter_columns(ours, self.map.device_columns, source, self.stream),
            lambda: plain.index_copy_(1, self.selected, source),
            useful=2 * source.nbytes,
            sectors=self.sectors_of_selected + source.nbytes,
            same=lambda: torch.equal(ours, plain),
        )

    def column_checksums(self):
        checksums, peer = self.new(self.slots, dtype=torch.int64), self.new(self.slots, dtype=torch.int64)
        bits = self.gradient.view(torch.int16 if self.item == 2 else torch.int32)
        keys = torch.arange(1, 2 * self.rows, 2, device=self.device)[:, None]  # as costly as the real ones

        def in_torch():
            peer.copy_((bits * keys).sum(0).index_select(0, self.deferred))

        return Case(
            "column_checksums",
            lambda: kernels.column_checksums(self.gradient, self.map, checksums, self.stream),
            in_torch,
            useful=self.rows * self.slots * self.item,
            sectors=self.sectors_of_deferred,
        )

    def adopt_edits(self):
        """Where nobody edited anything, as in almost every step that has to look."""
        weight = self.gradient
        expected, found = (self.new(self.slots, dtype=torch.int64) for _ in range(2))
        kernels.column_checksums(weight, self.map, expected, self.stream)
        last = self.adopt(weight[:, self.deferred].contiguous())
        changed = self.new(1, dtype=torch.bool)
        untouched = self.new(1)  # stands for host memory: without edits nothing reads or writes it

        def ours():
            arrays = (untouched, untouched, untouched)
            kernels.adopt_edits(weight, self.map, expected, found, *arrays, self.stream)

        def in_torch():  # compares with a copy on the device, which takes the memory that checksums save
            changed.copy_((weight.index_select(1, self.deferred) != last).any())

        return Case(
            "adopt_edits, no edits",
            ours,
            in_torch,
            useful=self.rows * self.slots * self.item,
            sectors=self.sectors_of_deferred,
        )

    def build_place(self):
        peer = self.new(self.columns, dtype=torch.int32)
        slots = torch.arange(self.slots, dtype=torch.int32, device=self.device)
        positions = -1 - torch.arange(self.width, dtype=torch.int32, device=self.device)

        def in_torch():
            peer.index_copy_(0, self.deferred, slots)
            peer.index_copy_(0, self.selected, positions)

        return Case(
            "build_place",
            lambda: kernels.build_place(self.map, self.stream),
            in_torch,
            same=lambda: torch.equal(self.map.place, peer),
        )

    def top_k(self, columns):
        norms, k = self.random(columns, dtype=torch.float32).square_(), columns // 10
        selected, peer = self.new(k, dtype=torch.int32), self.new(k, dtype=torch.int32)

        def in_torch():
            peer.copy_(norms.topk(k).indices.sort().values)

        return Case(
            f"top_k of {columns:,}",
            lambda: kernels.top_k([norms], [selected], self.stream),
            in_torch,
            same=lambda: torch.equal(selected, peer),
        )
