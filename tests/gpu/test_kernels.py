# SPDX-License-Identifier: Apache-2.0
"""Each kernel against a few lines of torch, bit for bit (docs/arithmetic.md), on random shapes and dtypes."""

import math
import random

import pytest
import torch

import kernels
from compare import assert_same
from kernels import Columns, Rule, State
from reference import added, column_norms, fold, fp32, move, same_bits
from strategies import BF16, DTYPES, FP16, FP32

SEEDS = range(12)
ODD_SHAPES = [(0, 4), (4, 0), (1, 1), (1, 300_000), (700, 3), (513, 32), (130, 300), (129, 8)]


class Dice(random.Random):
    """Sizes around the borders of warps, tiles and blocks, and values that a float can have."""

    def __init__(self, seed):
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def shape(self):
        rows = self.choice([1, 2, 63, 64, 65, 127, 128, 129, 257, self.randint(1, 400)])
        columns = self.choice([1, 7, 31, 32, 33, 8 * self.randint(1, 40), 255, 256, 257, self.randint(1, 500)])
        return (rows, columns) if rows * columns <= 40_000 else (rows, self.randint(1, 60))

    def matrix(self, shape, dtype, wild=None):
        """Ordinary values; if wild (else one time in four), also denormal, huge, infinite and NaN ones."""
        values = torch.randn(shape, generator=self.torch)
        if self.random() < 0.25 if wild is None else wild:
            exponents = torch.randint(-140, 120, shape, generator=self.torch)
            values = torch.ldexp(values, exponents if dtype is not FP16 else exponents // 8)
            odd = torch.rand(shape, generator=self.torch)
            values = torch.where(odd < 0.02, torch.inf, torch.where(odd > 0.98, torch.nan, values))
        return values.to(dtype)

    def positive(self, shape):
        return self.matrix(shape, FP32, wild=False).square()

    def columns(self, count, machine):
        """A random selection; both lists ascend but for some exchanges, as hand-overs leave them."""
        share = self.choice([0.0, 0.02, 0.1, 0.5, 1.0])
        selected = [c for c in range(count) if self.random() < share]
        deferred = sorted(set(range(count)) - set(selected))
        for names in (selected, deferred):
            for _ in range(self.choice([0, 3]) if names else 0):
                i, j = self.randrange(len(names)), self.randrange(len(names))
                names[i], names[j] = names[j], names[i]
        lists = [torch.tensor(names, dtype=torch.int32) for names in (deferred, selected)]
        columns = Columns(*map(machine.put, lists), machine.empty(count, dtype=torch.int32))
        kernels.build_place(columns, machine.stream)
        return columns, *(names.long() for names in lists)

    def state(self, machine, weight_dtype, shape, selected):
        """A weight, and the state of its selected columns: some of the masters do not belong to their weight."""
        weight = self.matrix(shape, weight_dtype)
        master = weight[:, selected].float()
        edited = torch.rand(master.shape, generator=self.torch) < 0.2
        master = torch.where(edited, torch.randn(master.shape, generator=self.torch), master)
        kept = [weight, master, self.matrix(master.shape, FP32, wild=False), self.positive(master.shape)]
        return State(*(machine.put(t, self.randint(0, 3)) for t in kept)), kept

    def rule(self):
        return Rule(
            lr=self.choice([0.0, 1e-3, 0.3]),
            betas=self.choice([(0.9, 0.999), (0.3, 0.5), (0.0, 0.9)]),
            eps=self.choice([1e-8, 1e-3]),
            weight_decay=self.choice([0.0, 0.1]),
            step=self.randint(1, 2000),
            scale=self.choice([1.0, -1.0, 0.3]),
        )


# The norms, and what follows from them


@pytest.mark.parametrize("seed", SEEDS)
def test_column_norms(machine, seed):
    dice = Dice(seed)
    shapes = [dice.shape() for _ in range(5)] if seed else ODD_SHAPES
    originals = [dice.matrix(shape, dice.choice(DTYPES)) for shape in shapes]
    gradients = [machine.put(g, dice.randint(0, 3)) for g in originals]
    norms = [machine.empty(g.shape[1], offset=1) for g in gradients]
    scratch = machine.empty(kernels.column_norms_scratch(gradients, norms))
    kernels.column_norms(gradients, norms, scratch, machine.stream)
    for original, norm in zip(originals, norms, strict=True):
        assert_same(machine.get(norm), column_norms(original.float()), f"norms of {tuple(original.shape)}")


@pytest.mark.parametrize("seed", SEEDS)
def test_squared_norms_and_the_clipping_coefficient(machine, seed):
    dice = Dice(seed)
    rows = [dice.matrix((dice.choice([0, 1, 5, 256, 600]),), FP32, wild=seed == 0).square() for _ in range(40)]
    norms = [machine.put(row) for row in rows]
    squared = machine.empty(len(rows), dtype=torch.float64)
    norm, coefficient = machine.empty(1, dtype=torch.float64), machine.empty(1)
    max_norm = dice.choice([0.5, 5.0, 1e6])
    kernels.squared_norms([n.view(1, -1) for n in norms], norms, squared, machine.stream)
    kernels.clip_coefficient(squared, max_norm, norm, coefficient, machine.stream)

    expected = [added([added(row[i::256].tolist()) for i in range(256)]) for row in rows]
    total = math.sqrt(added(expected))
    assert_doubles(machine.get(squared), torch.tensor(expected, dtype=torch.float64))
    assert_doubles(machine.get(norm), torch.tensor([total], dtype=torch.float64))
    clipped = min(1.0, max_norm / (total + 1e-6)) if math.isfinite(total) else 1.0
    assert_same(machine.get(coefficient), fp32([clipped]), "coefficient")


@pytest.mark.parametrize("seed", SEEDS)
def test_norms_of_either_side(machine, seed):
    dice = Dice(seed)
    rows = [dice.matrix((dice.choice([0, 1, 5, 256, 600]),), FP32, wild=seed == 0).square() for _ in range(40)]
    places = [(dice.matrix(row.shape, FP32) * 10).int() for row in rows]
    norms, there = [machine.put(row) for row in rows], [machine.put(place) for place in places]
    sides = machine.empty(len(rows), 2, dtype=torch.float64)
    kernels.side_norms(norms, there, list(sides), machine.stream)

    def side(row, mask):
        row = torch.where(mask, row, 0)
        return added([added(row[i::256].tolist()) for i in range(256)])

    expected = [[side(r, p < 0), side(r, p >= 0)] for r, p in zip(rows, places, strict=True)]
    assert_doubles(machine.get(sides), torch.tensor(expected, dtype=torch.float64))


def assert_doubles(actual, expected):
    assert ((actual == expected) | (actual.isnan() & expected.isnan())).all(), (actual, expected)


def largest(norms, k):
    def rank(j):
        norm = norms[j].item()
        return (0, -norm, j) if math.isfinite(norm) else (1, 0, j)

    return torch.tensor(sorted(sorted(range(len(norms)), key=rank)[:k]), dtype=torch.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_top_k(machine, seed):
    dice = Dice(seed)
    tasks = []
    for columns in (1, 31, 1024, 4096, 4097, dice.randint(1, 9000), *([28_672, 40_000] if seed == 0 else [])):
        norms = dice.positive((columns,))
        if dice.random() < 0.5:  # ties
            norms = (norms * 2).round()
        norms[torch.rand(columns, generator=dice.torch) < dice.choice([0.0, 0.1, 1.0])] = dice.choice(
            [math.inf, math.nan]
        )
        tasks.append((norms, dice.choice([0, 1, columns, round(0.1 * columns), dice.randint(0, columns)])))
    selected = [machine.empty(k, dtype=torch.int32) for _, k in tasks]
    kernels.top_k([machine.put(norms) for norms, _ in tasks], selected, machine.stream)
    for (norms, k), found in zip(tasks, selected, strict=True):
        assert machine.get(found).tolist() == largest(norms, k).tolist(), f"{k} of {len(norms)}"


# The pass over the gradient


def updated(kept, gradient, rule, coefficient, corrections, selected):
    """What AdamW makes of [weight, master, exp_avg, exp_avg_sq], as docs/arithmetic.md says; gradient of `selected`."""
    weight, master, m, v = kept
    live = weight[:, selected]
    master = torch.where(same_bits(live, master.to(live.dtype)), master, live.float())  # an edit becomes the master
    scale = fp32(rule.scale) * (1.0 if coefficient is None else coefficient)
    m, v = fold(m, v, gradient.float() * scale, *rule.betas)
    counts = [rule.step] * len(selected) if corrections is None else corrections
    moved, _ = move(master, m, v, counts, _Last(rule), rule.lr, 1 - rule.lr * rule.weight_decay, 0.0)
    weight = weight.clone()
    weight[:, selected] = moved.to(weight.dtype)
    return [weight, moved, m, v]


class _Last:
    """The settings of a gradient, under reference.Gradient's names."""

    def __init__(self, rule):
        self.lr, self.eps, (self.beta1, self.beta2) = rule.lr, rule.eps, rule.betas


def assert_state(machine, state, expected, what):
    found = [state.weight, state.master, state.exp_avg, state.exp_avg_sq]
    for name, a, b in zip(("weight", "master", "exp_avg", "exp_avg_sq"), found, expected, strict=True):
        assert_same(machine.get(a), b, f"{name} of {what}")


def corrections_of(machine, rule, counts):
    """The device's and the reference's form of a number of updates for each column."""
    step = fp32([rule.lr / (1 - rule.betas[0] ** t) for t in counts])
    root = fp32([1 / math.sqrt(1 - rule.betas[1] ** t) for t in counts])
    return machine.put(step), machine.put(root)


def random_update(dice, machine, width):
    rule = dice.rule()
    coefficient = fp32(0.37) if dice.random() < 0.5 else None
    counts = [dice.randint(1, 50) for _ in range(width)] if dice.random() < 0.3 and rule.lr else None
    arguments = {
        "coefficient": None if coefficient is None else machine.put(coefficient.view(1)),
        "corrections": None if counts is None else corrections_of(machine, rule, counts),
    }
    return rule, coefficient, counts, arguments


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widens", [False, True])
def test_selective_adam(machine, gradient_dtype, weight_dtype, widens):
    dice = Dice(9 * widens + 3 * DTYPES.index(gradient_dtype) + DTYPES.index(weight_dtype))
    for shape in [dice.shape() for _ in range(3)] + [dice.choice(ODD_SHAPES)]:
        original = dice.matrix(shape, gradient_dtype)
        columns, deferred, selected = dice.columns(shape[1], machine)
        state, kept = dice.state(machine, weight_dtype, shape, selected)
        packed = machine.empty(
            shape[0], len(deferred), dtype=FP32 if widens else gradient_dtype, offset=dice.randint(0, 3)
        )
        rule, coefficient, counts, arguments = random_update(dice, machine, len(selected))
        gradient = machine.put(original, dice.randint(0, 3))
        kernels.selective_adam(gradient, columns, packed, state, rule, machine.stream, **arguments)

        expected = updated(kept, original[:, selected], rule, coefficient, counts, selected)
        assert_state(machine, state, expected, str(shape))
        assert_same(machine.get(packed), original[:, deferred].to(packed.dtype), f"packed of {shape}")
        assert_same(machine.get(gradient), original, f"gradient of {shape}")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_is_split_and_put_together_again(machine, seed):
    dice = Dice(seed)
    for shape in [dice.shape() for _ in range(3)] + [dice.choice(ODD_SHAPES)]:
        original = dice.matrix(shape, dice.choice(DTYPES))
        columns, deferred, selected = dice.columns(shape[1], machine)
        packed, kept = (machine.empty(shape[0], len(names), dtype=original.dtype) for names in (deferred, selected))
        kernels.split_gradient(machine.put(original, dice.randint(0, 3)), columns, packed, kept, machine.stream)
        assert_same(machine.get(packed), original[:, deferred], f"packed of {shape}")
        assert_same(machine.get(kept), original[:, selected], f"kept of {shape}")
        back = machine.empty(*shape, dtype=original.dtype)
        kernels.unpack(back, columns, packed, kept, machine.stream)
        assert_same(machine.get(back), original, f"gradient of {shape}")


@pytest.mark.parametrize("seed", SEEDS)
def test_adam_of_many_parameters_in_one_call(machine, seed):
    dice = Dice(seed)
    tasks, expected = [], []
    coefficient = fp32(0.37) if seed % 2 else None
    for _ in range(60 if seed == 0 else 6):
        rows, columns = shape = dice.choice([(1, 1), (1, 64), (64, 64), (3, 5), dice.shape()])
        whole = dice.random() < 0.6
        selected = torch.arange(columns) if whole else torch.randperm(columns, generator=dice.torch)[: columns // 3]
        original = dice.matrix((rows, len(selected)), dice.choice(DTYPES))
        state, kept = dice.state(machine, dice.choice(DTYPES), shape, selected)
        rule, _, counts, arguments = random_update(dice, machine, len(selected))
        names = None if whole else machine.put(selected.int())
        gradient = machine.put(original, dice.choice([0, 0, 1]))
        task = kernels.adam_task(gradient, state, rule, device_columns=names, corrections=arguments["corrections"])
        tasks.append((task, gradient, names, arguments))
        expected.append((state, updated(kept, original, rule, coefficient, counts, selected)))
    device_coefficient = None if coefficient is None else machine.put(coefficient.view(1))
    kernels.adam([task for task, *_ in tasks], machine.stream, coefficient=device_coefficient)
    for i, (state, wanted) in enumerate(expected):
        assert_state(machine, state, wanted, f"task {i}")


# Columns on their way


@pytest.mark.parametrize("seed", SEEDS)
def test_build_place(machine, seed):
    dice = Dice(seed)
    for count in (0, 1, 255, 257, dice.randint(1, 3000)):
        columns, deferred, selected = dice.columns(count, machine)
        expected = torch.empty(count, dtype=torch.int32)
        expected[deferred] = torch.arange(len(deferred), dtype=torch.int32)
        expected[selected] = -1 - torch.arange(len(selected), dtype=torch.int32)
        assert torch.equal(machine.get(columns.place), expected)


def row_keys(rows):
    """64-bit keys as Python's integers: splitmix64, made odd."""
    keys = []
    for r in range(rows):
        z = (r + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        keys.append((z ^ z >> 31) | 1)
    return keys


def checksums_of(weight, deferred):
    """int64 with the bits of the kernel's unsigned sums."""
    wide = weight.element_size() == 4
    bits = weight.view(torch.int32 if wide else torch.int16).long() & (2**32 - 1 if wide else 2**16 - 1)
    bits = torch.where(weight.isnan(), 2**31 - 1 if wide else 2**15 - 1, bits)
    keys = [key - 2**64 if key >= 2**63 else key for key in row_keys(len(weight))]
    return (bits[:, deferred] * torch.tensor(keys, dtype=torch.int64)[:, None]).sum(0)  # wraps around


@pytest.mark.parametrize("seed", SEEDS)
def test_column_checksums(machine, seed):
    dice = Dice(seed)
    for shape in [dice.shape() for _ in range(3)] + [dice.choice(ODD_SHAPES)]:
        weight = dice.matrix(shape, dice.choice(DTYPES))
        columns, deferred, _ = dice.columns(shape[1], machine)
        checksums = machine.empty(len(deferred), dtype=torch.int64)
        kernels.column_checksums(machine.put(weight, dice.randint(0, 3)), columns, checksums, machine.stream)
        assert torch.equal(machine.get(checksums), checksums_of(weight, deferred)), shape


@pytest.mark.parametrize("seed", SEEDS)
def test_scatter_in_chunks(machine, seed):
    dice = Dice(seed)
    for shape in [dice.shape() for _ in range(3)] + [dice.choice(ODD_SHAPES)]:
        dtype = dice.choice(DTYPES)
        before = dice.matrix(shape, dtype)
        columns, deferred, _ = dice.columns(shape[1], machine)
        upload = dice.matrix((shape[0], len(deferred)), dtype)
        weight, source = machine.put(before, dice.randint(0, 3)), machine.put(upload, dice.randint(0, 3))
        checksums = machine.put(torch.zeros(len(deferred), dtype=torch.int64)) if dice.random() < 0.7 else None
        first = 0
        while first < shape[0]:
            rows = dice.randint(1, shape[0] - first)
            chunk = source[first : first + rows]
            kernels.scatter(chunk, weight, columns, machine.stream, first_row=first, checksums=checksums)
            first += rows
        after = before.clone()
        after[:, deferred] = upload
        assert_same(machine.get(weight), after, f"weight of {shape}")
        if checksums is not None:
            assert torch.equal(machine.get(checksums), checksums_of(after, deferred)), shape


@pytest.mark.parametrize("seed", SEEDS)
def test_gather_and_scatter_of_columns(machine, seed):
    dice = Dice(seed)
    for shape in [dice.shape() for _ in range(3)] + [(0, 7)]:
        original = dice.matrix(shape, dice.choice(DTYPES))
        names = torch.randperm(shape[1], generator=dice.torch)[: dice.randint(0, shape[1])]
        matrix, indices = machine.put(original, dice.randint(0, 3)), machine.put(names.int())
        out = machine.empty(shape[0], len(names), dtype=original.dtype)
        kernels.gather_columns(matrix, indices, out, machine.stream)
        assert_same(machine.get(out), original[:, names], f"columns of {shape}")

        source = dice.matrix((shape[0], len(names)), original.dtype)
        kernels.scatter_columns(matrix, indices, machine.put(source), machine.stream)
        original[:, names] = source
        assert_same(machine.get(matrix), original, f"matrix of {shape}")


@pytest.mark.parametrize("edited_share", [0.0, 0.01, 0.6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edits_are_adopted_by_value(machine, dtype, edited_share):
    dice = Dice(int(100 * edited_share) + DTYPES.index(dtype))
    for shape in [dice.shape() for _ in range(3)] + [(0, 3), (2, 3000)]:
        weight = dice.matrix(shape, dtype)
        columns, deferred, _ = dice.columns(shape[1], machine)
        last, compact = weight[:, deferred], (shape[0], len(deferred))
        pending, master = dice.matrix(compact, dtype, wild=False), dice.matrix(compact, FP32, wild=False)
        host = [machine.host(t) for t in (last, pending, master)]
        expected = machine.put(checksums_of(weight, deferred))

        edits = torch.rand(shape, generator=dice.torch) < edited_share
        weight = torch.where(edits, dice.matrix(shape, dtype), weight)
        live, found = machine.put(weight, dice.randint(0, 3)), machine.empty(len(deferred), dtype=torch.int64)
        kernels.adopt_edits(live, columns, expected, found, *host, machine.stream)

        now = weight[:, deferred]
        same = same_bits(now, last)
        wanted = torch.where(same, last, now), torch.where(same, pending, now), torch.where(same, master, now.float())
        for name, array, value in zip(("last_written", "pending", "master"), host, wanted, strict=True):
            assert_same(machine.get(array), value, f"{name} of {shape}")
        assert torch.equal(machine.get(expected), checksums_of(weight, deferred)), shape


# What only real memory can show


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """Offsets are 64 bits wide. Plain torch on the device is the reference, for the last rows."""
    rows, columns, last = 70_001, 32_768, 130
    needed = 3 * 2 * rows * columns + 2**30
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free device memory, there are {free / 1e9:.0f}")
    stream = torch.cuda.current_stream().cuda_stream
    generator = torch.Generator("cuda").manual_seed(0)
    gradient = torch.randn(rows, columns, generator=generator, dtype=BF16, device="cuda")
    device_columns = torch.arange(0, columns, 10, dtype=torch.int32, device="cuda")
    mask = torch.ones(columns, dtype=torch.bool, device="cuda")
    mask[device_columns.long()] = False
    slot_columns = mask.nonzero().flatten().int()
    place = Columns(slot_columns, device_columns, torch.empty(columns, dtype=torch.int32, device="cuda"))
    kernels.build_place(place, stream)

    packed = torch.empty(rows, len(slot_columns), dtype=BF16, device="cuda")
    kept = torch.empty(rows, len(device_columns), dtype=BF16, device="cuda")
    kernels.split_gradient(gradient, place, packed, kept, stream)
    assert torch.equal(packed[-last:], gradient[-last:, slot_columns.long()])
    assert torch.equal(kept[-last:], gradient[-last:, device_columns.long()])

    weight = torch.zeros_like(gradient)
    kernels.scatter(packed, weight, place, stream)
    assert torch.equal(weight[-last:, slot_columns.long()], packed[-last:])
    assert not weight[:, device_columns.long()].any()
    kernels.unpack(weight, place, packed, kept, stream)
    assert torch.equal(weight[-last:], gradient[-last:])
    del packed, kept, weight

    norms = [torch.empty(columns, device="cuda")]
    scratch = torch.empty(kernels.column_norms_scratch([gradient], norms), device="cuda")
    kernels.column_norms([gradient], norms, scratch, stream)
    exact = sum(part.double().square().sum(0) for part in gradient.split(1000))
    assert ((norms[0].double() - exact).abs() <= 1e-4 * exact).all()
