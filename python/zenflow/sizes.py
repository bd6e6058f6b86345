# SPDX-License-Identifier: Apache-2.0
"""How many bytes the optimizer holds and moves, from shapes and settings alone (docs/memory.md). Needs no torch.

A parameter is its shape; `item` is the bytes of one of its elements, and of one of its gradients'. `selected` is how
many of its columns are selected, or None if it is not split.
"""

import math

CHUNK_BYTES = 16 << 20  # in which gradients leave a GPU and weights return to it
DOWN_CHUNKS = 4


def matrix_shape(shape):
    """(rows, columns) of a tensor's matrix view: 3-D [d0*d1, d2]; 4-D and more [d0, rest]; 0-D and 1-D [1, n]."""
    split = (0, 0, 1, 2)[len(shape)] if len(shape) < 4 else 1
    return math.prod(shape[:split]), math.prod(shape[split:])


def is_split(shape, settings):
    """Whether a parameter of this shape has deferred columns, unless its group says `split=False`."""
    return len(shape) >= 2 and math.prod(shape) >= max(1, settings.min_offload_numel)


def selected_count(topk_ratio, columns):
    """How many of a parameter's columns are selected: at least one, unless the ratio is 0."""
    if topk_ratio == 0 or columns == 0:
        return 0
    return min(columns, max(1, math.floor(topk_ratio * columns + 0.5)))


def selected_columns(shape, split, topk_ratio):
    """The `selected` of a parameter, as the functions below take it."""
    return selected_count(topk_ratio, matrix_shape(shape)[1]) if split else None


def deferred_count(shape, selected):
    """Elements in deferred columns."""
    rows, columns = matrix_shape(shape)
    return 0 if selected is None else rows * (columns - selected)


def lane_count(settings, stream):
    """Lanes of gradients per parameter: of one window (or step, streaming) and of steps with an update in flight."""
    return (1 if stream else settings.longest_interval) + settings.update_delay


def host_bytes(shape, item, selected, settings, stream):
    """Bytes of host memory for a parameter's deferred columns, once the first window is open."""
    return deferred_count(shape, selected) * (
        _fixed_bytes(item, settings, stream) + lane_count(settings, stream) * item
    )


def warm_up_host_bytes(shape, item, selected, settings, stream):
    """The same during full_warm_up_rounds: every column is deferred, with one lane."""
    if selected is None or not settings.full_warm_up_rounds:
        return 0
    return math.prod(shape) * (_fixed_bytes(item, settings, stream) + item)


def _fixed_bytes(item, settings, stream):
    total = 4 if stream and settings.deferred_rule == "mean" else 0
    # master; exp_avg and exp_avg_sq; last written and pending output
    return 4 + 2 * settings.moment_bytes + 2 * item + total


def device_bytes(shape, item, selected, settings):
    """Bytes beside a parameter for its selected columns, or all of it: master, exp_avg and exp_avg_sq; and, where they
    wait for step() there, the selected columns' gradients."""
    rows, columns = matrix_shape(shape)
    if selected is None:
        return 12 * rows * columns
    return (12 + (item if settings.offload_gradients else 0)) * rows * selected


def moved_bytes(item, interval, *, mean, stream, moment=4):
    """Bytes that the update of a window reads and writes in host memory, per deferred element: (closing pass, each of
    the interval - 1 passes before it, which only "stream" has).

    The closing pass reads and writes master and moments (`moment` bytes each), reads its lanes, and writes the weight
    that shows next.
    """
    state = 8 + 4 * moment
    if not stream:
        return state + item + interval * item, 0
    carried = 8 if mean else 4 * moment  # the sum, or the moments: read and written
    return state + (8 if mean else 0) + 2 * item, carried + item


def gpu_work_bytes(shapes, selected, settings):
    """Bytes that a GPU holds beside states: chunks on their way, the split parameters' column maps and checksums, and
    the partial sums of the gradients measured at once."""
    split = [matrix_shape(shape) for shape, columns in zip(shapes, selected, strict=True) if columns is not None]
    if not split:
        return 0
    norms = [4 * columns * (-(-rows // 128) + 1) for rows, columns in split]
    measured = max(norms) if settings.offload_gradients else sum(norms)
    return (DOWN_CHUNKS + 1) * CHUNK_BYTES + 24 * sum(columns for _, columns in split) + measured
