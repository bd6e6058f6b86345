# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as shapes: of a live model, of a Hugging Face config, or made up from a number.

Torch and transformers are used where they are there already, or where nothing else knows a model.
"""

import dataclasses
import json
import math
from pathlib import Path

ITEMS = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}
SIDE = 4096  # of the matrices that a number alone is taken for


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """`shapes` and `items` (bytes of an element) of the parameters that are trained; frozen_bytes of the others.

    source says where they come from; item is the dtype's of a config, or None.
    """

    shapes: tuple[tuple[int, ...], ...]
    items: tuple[int, ...]
    source: str
    frozen_bytes: int = 0

    @property
    def count(self):
        return sum(map(math.prod, self.shapes))


def item_of(dtype):
    """Bytes of an element of a dtype, by its name or torch's own object."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMS:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, ITEMS))}, got {dtype!r}")
    return ITEMS[name]


def of_number(count, item):
    """Square matrices, all of them split."""
    side = min(SIDE, max(1, math.isqrt(count)))
    squares, rest = divmod(count, side * side)
    shapes = [(side, side)] * squares
    if rest >= side:
        shapes.append((rest // side, side))
    if rest % side:
        shapes.append((rest % side,))
    source = f"no shapes: taken as matrices of {side} x {side}, all of them split"
    return ModelShapes(tuple(shapes), (item,) * len(shapes), source)


def of_parameters(parameters, item):
    """Of a torch.nn.Module or an iterable of parameters; `item` in place of their dtypes', unless it is None."""
    module = hasattr(parameters, "parameters")
    if hasattr(parameters, "param_groups"):  # an optimizer
        found = (p for group in parameters.param_groups for p in group["params"])
    else:
        found = parameters.parameters() if module else parameters
    found = (p[1] if isinstance(p, tuple) else p for p in found)  # named
    tensors = list({id(p): p for p in found}.values())
    trained = [p for p in tensors if p.requires_grad]
    frozen = sum(p.numel() * (item or p.element_size()) for p in tensors if not p.requires_grad)
    source = f"{type(parameters).__name__}, its own shapes" if module else "parameters, their own shapes"
    return ModelShapes(
        tuple(tuple(p.shape) for p in trained), tuple(item or p.element_size() for p in trained), source, frozen
    )


def of_config(path, item):
    """Of a Hugging Face config: a config.json or the folder that it is in. `item` wins over the config's dtype."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"config must be a config.json or a folder with one, on this machine, got {str(path)!r}: {error}; a hub's "
            "names are not fetched, and a number of parameters goes into params"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(config).__name__}")
    item = item or item_of(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    kind = config.get("model_type")
    if kind in _LLAMA_TYPES:
        shapes = tuple(_llama_shapes(config, file, **_LLAMA_TYPES[kind]))
        return ModelShapes(shapes, (item,) * len(shapes), f"{kind} config, exact shapes")
    parameters = _built_by_transformers(file, kind)
    shapes = tuple(tuple(p.shape) for p in parameters)
    return ModelShapes(shapes, (item,) * len(shapes), f"{kind} config, exact shapes by transformers")


# The decoders that differ in biases and small norms only. True and False: whatever the config says of biases.
_LLAMA_TYPES = {
    "llama": {},
    "mistral": {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    "qwen2": {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "tied": False},
    "qwen3": {"mlp_bias": False, "head_norms": True, "tied": False},
}


def _llama_shapes(config, file, *, qkv_bias=None, o_bias=None, mlp_bias=None, head_norms=False, tied=False):
    def value(name, default=None):
        found = config.get(name)
        found = default if found is None else found
        if found is None:
            raise ValueError(f"{file} has no {name}, which a {config['model_type']} config needs")
        return found

    hidden, inner, layers = value("hidden_size"), value("intermediate_size"), value("num_hidden_layers")
    heads, vocabulary = value("num_attention_heads"), value("vocab_size")
    head = value("head_dim", 128 if head_norms else hidden // heads)
    key_heads = value("num_key_value_heads", heads)
    attention_bias = value("attention_bias", False)
    qkv_bias = attention_bias if qkv_bias is None else qkv_bias
    o_bias = attention_bias if o_bias is None else o_bias
    mlp_bias = value("mlp_bias", False) if mlp_bias is None else mlp_bias

    def linear(rows, columns, bias):
        return [(rows, columns), (rows,)] if bias else [(rows, columns)]

    yield (vocabulary, hidden)
    for _ in range(layers):
        yield from linear(heads * head, hidden, qkv_bias)
        yield from linear(key_heads * head, hidden, qkv_bias) * 2
        yield from linear(hidden, heads * head, o_bias)
        yield from [(head,)] * (2 if head_norms else 0)
        yield from linear(inner, hidden, mlp_bias) * 2
        yield from linear(hidden, inner, mlp_bias)
        yield from [(hidden,)] * 2
    yield (hidden,)
    if not value("tie_word_embeddings", tied):
        yield (vocabulary, hidden)


def _built_by_transformers(file, kind):
    """Parameters without memory of what is neither a llama nor like one."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        known = ", ".join(_LLAMA_TYPES)
        raise ValueError(
            f"{file} is of model_type {kind!r}: its shapes need transformers and torch ({error}). Without them "
            f"{known} are known; or give the number of parameters"
        ) from error
    config = transformers.AutoConfig.from_pretrained(file)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    with torch.device("meta"):
        model = named[0](config) if named and named[0] else transformers.AutoModel.from_config(config)
    return list(model.parameters())
