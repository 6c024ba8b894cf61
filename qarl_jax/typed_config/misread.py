# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds values that YAML 1.1 silently reads as something other than was meant."""

from __future__ import annotations

import re

import yaml


def misread(node: yaml.Node) -> str:
    """Returns a message if YAML 1.1 reads a number as another one (010 as 8, 1:30 as 90), else ""."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return ""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
        number = yaml.SafeLoader("").construct_object(node)
        return f"YAML reads {node.value} as {number}: write {number}, or quote it."
    return ""


def mistake_of(node: yaml.Node) -> str:
    """Returns a message about a mistake in an override's value that YAML accepts silently, else ""."""
    if not isinstance(node, yaml.CollectionNode):
        return misread(node)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for i, key in enumerate(keys) if key in keys[:i]), ""):
            return f"key {twice!r} is given twice; keep one."
    parts = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    return next(filter(None, map(mistake_of, parts)), "")
