# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing Hugging Face folders: config.json, safetensors, quantized releases, PEFT adapters."""
