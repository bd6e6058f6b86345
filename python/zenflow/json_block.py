# SPDX-License-Identifier: Apache-2.0
"""JSON objects of which each key is accounted for: used, or named as unused. Not for: what the keys mean."""

import difflib
import json
import os

TYPO = 0.85  # a key as similar as this to one that is used is probably that one, mistyped


class Block:
    """An object of the configuration that remembers which of its keys were used."""

    def __init__(self, content, path=""):
        if not isinstance(content, dict):
            raise ValueError(f"{path or 'the configuration'} must be a JSON object, got a {type(content).__name__}")
        self._content, self._path = content, path
        self._used, self._blocks = set(), []

    def __contains__(self, key):
        return self._content.get(key) is not None

    def path(self, key):
        return f"{self._path}.{key}" if self._path else key

    def take(self, key, default=None, *, auto_is_absent=False):
        """The key's value, used from now on; `default` if it is absent or null."""
        self._used.add(key)
        value = self._content.get(key)
        return default if value is None or (auto_is_absent and is_auto(value)) else value

    def take_if(self, key, *agreeing):
        """Uses the key if its value is what happens anyway."""
        if self._content.get(key) in (None, *agreeing):
            self.take(key)

    def take_if_off(self, key):
        """Uses the object under the key if it switches itself off."""
        content = self._content.get(key)
        if isinstance(content, dict) and content.get("enabled", False) is False:
            self.take(key)

    def block(self, key):
        """The object under the key, or an empty one."""
        inner = Block(self.take(key, {}), self.path(key))
        self._blocks.append(inner)
        return inner

    def unused(self):
        """[(path, similar key that would be used, or None)]; a block of which nothing is used is named as a whole."""
        found = []
        for key in self._content:
            if key not in self._used:
                close = difflib.get_close_matches(str(key), self._used - self._content.keys(), n=1, cutoff=TYPO)
                found.append((self.path(key), *(close or [None])))
        for inner in self._blocks:
            found += inner.unused()
        return found


def load(config):
    """The configuration itself, if it is given as the path of a JSON file."""
    if not isinstance(config, (str, os.PathLike)):
        return config
    if isinstance(config, str) and config.lstrip().startswith("{"):
        raise ValueError("the configuration is JSON text, which is taken for a path: pass a dict, json.loads(text)")
    with open(config, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_without_duplicates)
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(config)} cannot be read as JSON ({error}): remove comments and trailing commas, or pass a "
                "dict"
            ) from None


def _without_duplicates(pairs):
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return content


def is_auto(value):
    return isinstance(value, str) and value == "auto"
